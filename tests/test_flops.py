"""Model FLOPs against torch's own count of a real step, and a measured peak."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.shape import gpt_shape
from gptrain.loss import next_token_loss
from gptrain.models import SimpleGPT
from gptrain.runtime.measure import measure_matmul


@pytest.mark.parametrize(
    "size",  # vocab_size, d_model, n_heads, n_layers, positions
    [(1000, 64, 4, 2, 32), (64, 32, 2, 3, 128), (256, 32, 4, 8, 16)],
    ids=["wide vocabulary", "long sequence", "deep"],
)
def test_the_formula_counts_what_torch_counts_within_one_percent(size):
    vocab_size, d_model, n_heads, n_layers, n_positions = size
    net = SimpleGPT(vocab_size, d_model, n_heads, n_layers, n_positions)
    tokens = torch.randint(vocab_size, (2, n_positions))
    # The plain kernel: a fused one computes the scores a second time in its backward pass, which
    # torch counts and model FLOPs do not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        next_token_loss(net(tokens), tokens).backward()
    weights = gpt_shape(*size).matrix_weights
    flops = tokens.numel() * train_flops_per_token(weights, n_layers, d_model, n_positions)
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_measuring_the_peak_does_not_change_the_runs_random_numbers():
    state = torch.get_rng_state()
    assert measure_matmul(torch.device("cpu"), torch.float32, side=64, seconds=0) > 0
    assert torch.equal(torch.get_rng_state(), state)
