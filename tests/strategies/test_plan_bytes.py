"""The planner's formulas: bytes that a rank sends in a step, and that it holds."""

from functools import partial
from types import SimpleNamespace

import torch.distributed as dist
from count_bytes import CountBytes
from kinds import ACCUMULATE, BATCH, D, OneProcess, Piped, Replicated, Sharded, T, V, training_bytes
from ranks import on_ranks

from gptrain.costs.communication import find_traffic
from gptrain.costs.memory import estimate_states
from gptrain.costs.shape import gpt_shape
from gptrain.costs.work import Work
from gptrain.parallel.activation import apply_activation_checkpointing
from gptrain.parallel.diloco import DiLoCo
from gptrain.parallel.dims import ParallelDims

SHAPE = gpt_shape(vocab_size=V, d_model=D, n_heads=4, n_layers=4, max_seq_len=16)


def check_sent(name, kind, dims, *, recomputes="none", **more):
    """Bytes counted over one step agree with the planner's formula."""
    kind.step(0)  # what is sent once, at a first step, is not a step's
    with CountBytes() as counted:
        kind.step(1)
    work = make_work(name, dims, checkpointing=recomputes, **more)
    expected = sum(one.n_bytes for one in find_traffic(work))
    assert abs(counted.total / expected - 1) < 0.01, (name, counted.sent, expected)


def check_held(name, kind, dims, **more):
    kind.step(0)
    kind.optimizer.step()
    expected = sum(estimate_states(make_work(name, dims, **more)).values())
    assert abs(training_bytes(kind) / expected - 1) < 0.05, name


def make_work(name, dims, *, rank=0, checkpointing="none", **options):
    """What these ranks do in a step."""
    return Work(
        SHAPE,
        name,
        dims,
        BATCH // dims.data,
        T,
        accumulate=ACCUMULATE,
        checkpointing=checkpointing,
        rank=rank,
        options=options,
    )


@on_ranks(2)
def test_bytes_sent_are_those_of_the_plan():
    data, tensor = ParallelDims(data=2), ParallelDims(tensor=2)
    check_sent("fsdp", Sharded(data=2), data)
    kept = Sharded(data=2, reshard_after_forward=False)
    check_sent("fsdp", kept, data, reshard_after_forward=False)
    check_sent("fsdp", Sharded(data=2, syncs_each=True), data, accumulate_shards=True)
    check_sent("tensor_parallel", Sharded(tensor=2), tensor)
    for mode in ("full", "selective"):
        again = Sharded(tensor=2, prepare=partial(apply_activation_checkpointing, mode=mode))
        check_sent("tensor_parallel", again, tensor, recomputes=mode)
    stages = ParallelDims(pipeline=2)
    rank = dist.get_rank()
    check_sent("pipeline", Piped(), stages, rank=rank)
    interleaved = Piped("interleaved_1f1b")
    check_sent("pipeline", interleaved, stages, rank=rank, schedule="interleaved_1f1b")
    check_sent("ddp", Replicated(), data)


@on_ranks(2)
def test_replicas_send_what_they_moved_in_the_plans_share_of_a_step():
    """In fp32 and bf16, every fourth step."""
    net = OneProcess().net
    asked = {"replicas": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    for name in ("fp32", "bf16"):
        outer = DiLoCo(SimpleNamespace(**asked, outer_dtype=name), ParallelDims(data=2))
        outer.prepare(net, OneProcess().optimizer)
        with CountBytes() as counted:
            outer.sync(4)
        options = {"sync_every": 4, "outer_dtype": name}
        (expected,) = find_traffic(make_work("diloco", ParallelDims(data=2), **options))
        assert abs(counted.total / 4 / expected.n_bytes - 1) < 0.01
        assert counted.calls["allreduce"] / 4 == expected.calls


@on_ranks(2)
def test_bytes_held_are_those_of_the_plan():
    check_held("fsdp", Sharded(data=2), ParallelDims(data=2))
    check_held("tensor_parallel", Sharded(tensor=2), ParallelDims(tensor=2))
    for schedule in ("1f1b", "interleaved_1f1b"):
        where = {"rank": dist.get_rank(), "schedule": schedule}
        check_held("pipeline", Piped(schedule), ParallelDims(pipeline=2), **where)


@on_ranks(4)
def test_bytes_of_the_mixes_are_those_of_the_plan():
    check_sent("fsdp_tensor_parallel", Sharded(data=2, tensor=2), ParallelDims(data=2, tensor=2))
    rank = dist.get_rank() // 2
    check_sent("ddp_pipeline", Piped(data=2), ParallelDims(data=2, pipeline=2), rank=rank)
    check_held("fsdp_tensor_parallel", Sharded(data=2, tensor=2), ParallelDims(data=2, tensor=2))
