"""Model FLOPs of a training step.

Conventions: a multiply-add is two FLOPs; the forward pass costs 2 and the backward pass 4 per
matrix weight and token; causal attention counts in full, recomputation does not.
Source: Chowdhery et al. 2022, "PaLM", appendix B, arXiv:2204.02311.
"""

from __future__ import annotations


def train_flops_per_token(
    n_matrix_weights: int, n_layers: int = 0, d_attention: int = 0, seq_len: int = 0
) -> int:
    """Model FLOPs that one token of a training step costs: 6 N + 12 L (H Q) T.

    Args:
        n_matrix_weights: N, weights that multiply each token: all matrices with the head (also
            where it is tied to the token table), without tables that are only looked up in.
        n_layers: L, attention layers.
        d_attention: H Q, heads times width of a head.
        seq_len: T, positions of a sequence.
    """
    return 6 * n_matrix_weights + 12 * n_layers * d_attention * seq_len
