"""The planner's formulas for the bytes that a rank sends per step and keeps in memory."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from kinds import (
    ACCUMULATE,
    BATCH,
    CPU,
    D,
    Parallel,
    T,
    V,
    broadcast,
    training_bytes,
)
from ranks import on_ranks

from gptrain.costs.communication import find_traffic
from gptrain.costs.memory import estimate_states
from gptrain.costs.optimizers import MuonFacts
from gptrain.costs.shape import gpt_shape
from gptrain.costs.work import Work
from gptrain.optim import Muon, muon_groups
from gptrain.optim.muon import native_dtype
from gptrain.plan import measure
from gptrain.plan.counters import COLLECTIVES, Sent

SHAPE = gpt_shape(vocab_size=V, d_model=D, n_heads=8, n_layers=4, max_seq_len=16)


def make_work(options, dims, *, checkpointing="none"):
    """Return the planner's description of this rank's work in a step."""
    return Work(
        SHAPE,
        options,
        dims,
        BATCH // dims.data,
        T,
        accumulate=ACCUMULATE,
        checkpointing=checkpointing,
        rank=dist.get_rank() // (dims.data * dims.ranks_per_sample),  # pipelines are outermost
    )


def check_bytes(name, **options):
    """Check the bytes sent in one step, and kept after the step, against the planner's formulas."""
    kind = Parallel(name, **options)
    work = make_work(kind.options, kind.dims, checkpointing=kind.recomputes)
    kind.step(0)  # the first step also sends data that later steps do not send
    kind.optimizer.step()
    held = sum(estimate_states(work).values())
    assert abs(training_bytes(kind) / held - 1) < 0.05, name
    with Sent() as counted:
        kind.step(1)
    sent = sum(entry.n_bytes for entry in find_traffic(work))
    assert abs(counted.total / sent - 1) < 0.01, (name, counted.n_bytes, sent)


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
    check_bytes("context_parallel", recomputes="selective")
    kind = Parallel("fsdp", replicas=2)
    kind.step(0)
    muon = Muon(muon_groups(kind.net))
    with Sent() as counted:
        muon.step()
    has_bf16 = native_dtype(CPU) == torch.bfloat16
    work = make_work(kind.options, kind.dims)
    work = replace(work, optimizer=MuonFacts(), is_cpu=True, has_bf16=has_bf16)
    sent = {entry.what: entry.n_bytes for entry in find_traffic(work)}["updates of Muon"]
    assert abs(counted.total / sent - 1) < 0.01, (counted.n_bytes, sent)


@on_ranks(2)
def test_the_slowest_rank_and_the_bandwidth_of_all_ranks_are_kept_beside_other_links():
    """Each call takes a millisecond. Of two ranks a ring sends two messages, in all the buffer."""
    path = Path(broadcast(tempfile.mkdtemp())) / "machine.json"
    speed = 1e10 * (2 + dist.get_rank())
    with (
        patch.object(measure, "measure_matmul", lambda *_: speed),
        patch.object(measure, "time_calls", lambda *_: 1e-3),
    ):
        measure.write_speeds([(4096, 1e-3), (65536, 3e-3)], CPU, path)
        dist.barrier()
        facts = json.loads(path.read_text())
        link = {"latency_s": 1e-3 / 2, "bytes_per_s": (65536 - 4096) / 2e-3, "wait_s": 0.0}
        assert facts["links"] == {"gloo": {"2": link}}
        assert facts["flops_per_s"] == {"float32": 2e10, "bfloat16": 2e10}
        assert facts["memory_bytes_per_s"] == 2 * (2 * 4 * measure.ACTIVATIONS) / 1e-3
        dist.barrier()
        if dist.get_rank() == 0:  # measured with four ranks, and over NCCL
            old = link | {"wait_s": 9.0}  # is measured again
            facts["links"] = {"gloo": {"2": old, "4": link}, "nccl": {"2": link}}
            path.write_text(json.dumps(facts))
        measure.write_speeds([(4096, 1e-3), (65536, 3e-3)], CPU, path)
        dist.barrier()
    links = json.loads(path.read_text())["links"]
    assert links == {"gloo": {"4": link, "2": link}, "nccl": {"2": link}}


@on_ranks(2)
def test_a_broadcast_and_an_all_to_all_are_counted():
    row = torch.ones(6)
    with Sent() as counted:
        dist.broadcast(row, 0)
        dist.all_to_all_single(torch.empty(6), row)
    n_bytes = dict.fromkeys(COLLECTIVES, 0.0) | {"broadcast": 12.0, "alltoall": 12.0}
    assert (counted.n_bytes, counted.total) == (n_bytes, 24.0)
