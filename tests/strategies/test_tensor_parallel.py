"""Tensor parallelism on two ranks equals one process, also with a sharded vocabulary."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from gptrain.core.strategies import ParallelDims
from gptrain.loss import LossOptions, token_losses
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.tensor import vocab_parallel_loss
from tests.strategies.ranks import on_ranks


def _head(v=61, d=8):
    """Return hidden states, the full head, this rank's shard, and targets with ignored entries."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, d, dtype=torch.float64, generator=generator, requires_grad=True)
    whole = torch.randn(v, d, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(v, (3, 7), generator=generator)
    targets[:, ::3] = -100
    mesh = build_mesh("cpu", ParallelDims(tensor=2))["tensor"]
    part = distribute_tensor(whole.detach(), mesh, [Shard(0)])
    return hidden, whole, part.requires_grad_(), targets


@on_ranks(2)
def test_the_loss_over_a_sharded_vocabulary_is_exact_with_all_loss_options():
    for options in map(LossOptions, (0.0, 0.1, 1.0) * 2, (0.0, 0.0, 0.0, 1e-2, 1e-2, 1e-2)):
        hidden, whole, part, targets = _head()
        expected = token_losses(hidden @ whole.T, targets, options).sum()
        expected_grads = torch.autograd.grad(expected, (hidden, whole))
        loss = vocab_parallel_loss(hidden, part, targets, options, chunk_tokens=4)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        of_hidden, of_part = torch.autograd.grad(loss, (hidden, part))
        dist.all_reduce(of_hidden)  # each rank's columns give a partial sum
        torch.testing.assert_close(of_hidden, expected_grads[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(of_part.full_tensor(), expected_grads[1], rtol=1e-10, atol=1e-12)
