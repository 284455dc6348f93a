"""The norm of the gradients of a step, of which several ranks may hold parts."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptrain.parallel.gradients import clip_grad_norm


@pytest.mark.parametrize("rank, norm", [(0, 13.0), (1, 3.0), (3, 0.0)])
def test_a_gradient_that_several_ranks_hold_is_counted_by_the_first_of_them(rank, norm):
    """Two copies of three shards on six ranks. The ranks of the fake group add nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
        sharded, replicated = (
            DTensor.from_local(torch.tensor([value]), mesh, [Replicate(), placement])
            for value, placement in ((3.0, Shard(0)), (4.0, Replicate()))
        )
        parameters = []
        for gradient in (sharded, replicated, torch.tensor([12.0])):
            parameters.append(torch.nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        assert clip_grad_norm(parameters, None) == norm
    finally:
        torch.distributed.destroy_process_group()


def test_the_norm_of_fp64_gradients_has_their_precision():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64) * (1 + 1e-10)
    assert clip_grad_norm([parameter], None).item() == pytest.approx(5 * (1 + 1e-10), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_16_bit_gradients_is_measured_in_fp32(dtype):
    """Squares overflow in fp16 at a norm of 256; bf16 has only 8 bits of mantissa."""
    values = [torch.randn(50, 40), torch.randn(2000)]
    gradients = [(50 * value).to(dtype) for value in values]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.cat([gradient.double().flatten() for gradient in gradients]).norm().item()
    assert expected > 2000
    assert clip_grad_norm(parameters, 1000.0).item() == pytest.approx(expected, rel=1e-6)
    clipped = torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm()
    # Rounding error of an element: half of the last of 8 (bf16) or 11 (fp16) bits.
    assert clipped.item() == pytest.approx(1000.0, rel=2**-8)
