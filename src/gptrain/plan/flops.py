"""Model FLOPs of a training step, and the peak of a device to hold them against.

Conventions: a multiply-add is two FLOPs; the forward pass costs 2 and the backward pass 4 per
matrix weight and token; causal attention counts in full, recomputation does not.
Source: Chowdhery et al. 2022, "PaLM", appendix B, arXiv:2204.02311.
"""

from __future__ import annotations

import re

# Dense peak of 16-bit matrix products with fp32 accumulation, in FLOP/s, from the makers' data
# sheets (their headline figures for sparse matrices are twice as high). Keys are whole words of
# the name that the driver reports; the first that is found counts, so the longer ones come first.
PEAK_FLOPS_PER_S = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100": 125e12,  # fp16: it has no bf16
    "T4": 65e12,  # fp16
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


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


def peak_flops_per_s(device_name: str) -> float | None:
    """Dense 16-bit peak of the device that the driver calls so; None if it is not in the table."""
    for key, peak in PEAK_FLOPS_PER_S.items():
        if re.search(rf"\b{key}\b", device_name):
            return peak
    return None
