"""Model FLOPs of a training step.

A multiply-add is two FLOPs. Per token, each matrix weight costs 2 FLOPs in the forward pass and 4
in the backward pass. Causal attention counts as full attention. Recomputation does not count.

Source: Chowdhery et al. 2022, "PaLM", appendix B, arXiv:2204.02311.
"""


def train_flops_per_token(
    n_matrix_weights: int, n_layers: int, d_attention: int, seq_len: int
) -> int:
    """Return the model FLOPs of one token in a training step: 6 N + 12 L (H Q) T.

    Args:
        n_matrix_weights: N, number of weights that multiply each token. These are all matrices and
            the head, also if the head is tied to the token table. Embedding tables do not count.
        n_layers: L, number of attention layers.
        d_attention: H Q, number of heads times the width of a head.
        seq_len: T, number of positions in a sequence.
    """
    return 6 * n_matrix_weights + 12 * n_layers * d_attention * seq_len
