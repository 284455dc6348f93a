"""The loss of a step is the mean over its targets, however the step is divided.

`runs.StrategyTests` tests the same for every strategy, on data with uneven numbers of targets.
"""

import pytest
import runs as helpers
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptrain.parallel.gradients import clip_grad_norm
from gptrain.parallel.strategy import StepMean

LAYOUTS = {
    "16 x 1": ("strategy=single", "data.batch_size=16"),
    "2 x 4 x 2": ("strategy=ddp", "trainer.devices=2", "data.batch_size=2"),
    "pipeline": ("strategy=pipeline", "trainer.devices=2"),
}
ONE_STEP = (*helpers.DROPOUT[1:2], "trainer.max_steps=1")


@pytest.mark.parametrize("module", ["Penalised", "MasksMore"])
def test_a_user_module_trains_identically_in_every_layout(module, runs):
    """Penalised adds a term to the loss, and MasksMore changes the targets."""
    words = (f"module._target_=own_parts.{module}", *ONE_STEP)
    layouts = dict(LAYOUTS)
    if module == "Penalised":
        layouts.pop("pipeline")  # each stage would add the term of its layers only
    truth, *others = (runs(*layout, *words) for layout in layouts.values())
    assert runs(*LAYOUTS["16 x 1"], *ONE_STEP).column("grad_norm") != truth.column("grad_norm")
    for run in others:
        helpers.check_close(run.column("train/loss"), truth.column("train/loss"))
        helpers.check_close(run.column("grad_norm"), truth.column("grad_norm"))


LOSS = torch.tensor(0.5)


def begun(n_targets, n_micro_batches, group=None):
    mean = StepMean(group, torch.device("cpu"))
    mean.compute_divisor(n_targets, n_micro_batches)
    mean.reset_counts()
    return mean


def test_without_ignored_targets_the_loss_is_the_micro_batch_mean_bit_for_bit():
    mean, targets = begun(3 * 77, 3), torch.ones(7, 11, dtype=torch.long)
    assert [mean.count_and_get_divisor(targets).item() for _ in range(3)] == 3 * [77.0]
    assert mean.reduce(LOSS) == 1.0


def test_each_step_is_corrected_only_by_its_own_targets():
    mean = begun(8, 2)
    for _ in range(2):
        mean.count_and_get_divisor(torch.tensor([1, -100, -100, -100]))
    assert mean.reduce(LOSS) == 8 / 2
    mean.compute_divisor(12, 2)
    mean.reset_counts()
    for _ in range(2):
        mean.count_and_get_divisor(torch.tensor([1, 2, 3, -100]))
    assert mean.reduce(LOSS) == 12 / 6
    assert mean.n_targets == 6
    mean.reset_counts()
    assert mean.reduce(LOSS) == 1.0  # training_step computes its loss itself
    assert mean.n_targets.isnan() and mean.loss == LOSS


def test_a_step_without_targets_has_a_loss_of_zero_and_no_correction():
    mean = begun(0, 2)
    for _ in range(2):
        loss = torch.zeros(()) / mean.count_and_get_divisor(torch.full((2, 3), -100))
        assert loss == 0.0
    assert mean.reduce(LOSS) == 1.0
    assert mean.n_targets == 0 and mean.loss.isnan()


def test_gradients_are_measured_and_clipped_after_the_correction():
    parameter = torch.nn.Parameter(torch.zeros(2))
    for max_norm, scale, expected in ((None, 2.0, [6.0, 8.0]), (2.5, 0.5, [1.5, 2.0])):
        parameter.grad = torch.tensor([3.0, 4.0])
        norm = clip_grad_norm([parameter], max_norm, scale=torch.tensor(scale))
        assert norm == pytest.approx(5.0 * scale)
        torch.testing.assert_close(parameter.grad, torch.tensor(expected))
    written = parameter.grad._version
    for off in (None, 0.0):  # clipping is disabled
        assert clip_grad_norm([parameter], off) == pytest.approx(2.5)
    assert parameter.grad._version == written
    assert clip_grad_norm([parameter], 0.25) == pytest.approx(2.5)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.15, 0.2]))
    assert clip_grad_norm([parameter], 1.0) == pytest.approx(0.25)  # a small norm is not raised
    torch.testing.assert_close(parameter.grad, torch.tensor([0.15, 0.2]))


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


@on_ranks(2)
def test_targets_changed_in_training_step_are_counted_at_the_end_of_the_step():
    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    mean = begun(6, 2, world)
    for n in (1 + rank, 2):  # the steps have seven targets; the batch had twelve
        mean.count_and_get_divisor(torch.tensor(n * [5] + 3 * [-100]))
    assert mean.divisor == 3.0
    assert mean.reduce(LOSS * (1 + rank)) * 7 == 12.0
    assert mean.loss == pytest.approx(0.75 * 12 / 7)
