"""The planner's formulas for the bytes that a rank sends per step and keeps in memory."""

import pytest
import torch.distributed as dist
from kinds import ACCUMULATE, BATCH, D, Parallel, T, V, training_bytes
from ranks import on_ranks
from sent import Sent

from gptrain.costs.net import Net
from gptrain.costs.step import Step, find_traffic, states

NET = Net(V, D, 8, 8, 4, 4 * D, has_biases=True, n_positions=16, is_tied=True)


def check_bytes(name, **options):
    """Check the bytes sent in one step, and kept after the step, against the planner's formulas."""
    kind = Parallel(name, **options)
    dims = kind.dims
    step = Step(
        NET,
        kind.options,
        dims,
        BATCH // dims.data,
        T,
        accumulate=ACCUMULATE,
        checkpointing=kind.recomputes,
        rank=dist.get_rank() // (dims.data * dims.ranks_per_sample),  # pipelines are outermost
    )
    kind.step(0)  # the first step also sends data that later steps do not send
    kind.optimizer.step()
    held = sum(states(step).values())
    assert abs(training_bytes(kind) / held - 1) < 0.05, name
    with Sent() as counted:
        kind.step(1)
    sent = sum(entry.n_bytes for entry in find_traffic(step))
    assert abs(counted.total / sent - 1) < 0.05, (name, counted.n_bytes, sent)


@pytest.mark.slow
@on_ranks(2)
def test_sent_and_kept_bytes_equal_the_plan():
    check_bytes("ddp")
    check_bytes("fsdp")
    check_bytes("fsdp", reshard_after_forward=False)
    check_bytes("fsdp", accumulate_shards=True)
    for mode in ("none", "full", "selective"):
        check_bytes("tensor_parallel", recomputes=mode)
    check_bytes("pipeline")


@pytest.mark.slow
@on_ranks(4)
def test_sent_and_kept_bytes_of_combined_strategies_equal_the_plan():
    check_bytes("fsdp_tensor_parallel")
    check_bytes("ddp_pipeline")
    check_bytes("fsdp", replicas=2)
    check_bytes("context_parallel", context_parallel_size=2)
