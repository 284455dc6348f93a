"""Fully sharded data parallelism: compiled, offloaded, and the ranks that share a copy."""

import time
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from kinds import CPU, Parallel, check_equals_one_process
from ranks import on_ranks
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from gptrain.core.strategies import ParallelDims, default_options
from gptrain.lit import strategies
from gptrain.parallel import base
from gptrain.parallel.mesh import (
    after_rank_0,
    build_mesh,
    build_shard_mesh,
    wait_for_rank_0,
)
from gptrain.parallel.pipeline import Pipeline


@pytest.mark.slow
@on_ranks(2)
def test_compiled_blocks_equal_one_process():
    """The blocks and their backward passes are traced only: code generation takes ten seconds."""
    compiled = partial(torch.compile, backend="aot_eager")
    with warnings.catch_warnings(), patch.object(torch, "compile", compiled):
        warnings.simplefilter("ignore")  # warnings of the compiler
        for name in ("fsdp", "tensor_parallel", "context_parallel"):
            packs = name == "context_parallel"
            check_equals_one_process(Parallel(name, compile="blocks"), packs)


@on_ranks(2)
def test_offloaded_shards_live_in_host_memory():
    for offloads, policy in ((True, CPUOffloadPolicy), (False, OffloadPolicy)):
        make = strategies.make_net_on
        with patch.object(strategies, "make_net_on", side_effect=make) as made:
            kind = Parallel("fsdp", cpu_offload=offloads)
        # Offloaded weights are made on the CPU, others on the device of the rank.
        assert (made.call_args.args[0] is CPU) != offloads
        groups = [block._get_fsdp_state()._fsdp_param_group for block in kind.net.blocks]
        assert [type(group.offload_policy) for group in groups] == 4 * [policy]


@on_ranks(2)
def test_an_optimizer_steps_shards_and_plain_tensors_without_a_kernel_for_both():
    """A multi-tensor kernel takes one kind of tensor. SGD and Adagrad have no fused one."""
    kind = Parallel("fsdp")
    kind.module.scale = torch.nn.Parameter(torch.ones(3))  # outside the net: a plain tensor
    norm = kind.net.norm.weight
    shards = [p for p in kind.net.parameters() if p is not norm]
    for make in (
        partial(torch.optim.SGD, lr=0.1, fused=True),
        partial(torch.optim.Adagrad, fused=True),
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
    ):
        optimizer = make([{"params": shards}, {"params": [norm, kind.module.scale]}])
        kind.parallel.prepare(kind.module, optimizer)
        of_shards, of_both = optimizer.param_groups
        assert (of_both["foreach"], of_both["fused"]) == (False, False)
        if not isinstance(optimizer, torch.optim.AdamW):
            assert of_shards["fused"] is None
        kind.step(0)
        kind.module.scale.grad = torch.ones(3)
        optimizer.step()
        assert not torch.equal(kind.module.scale, torch.ones(3))


def test_parameters_outside_the_net_are_averaged_over_the_ranks_that_read_other_samples():
    """The ranks of the fake group add nothing to a sum. The net has no gradients."""
    for name, options, dims, n_ranks in (
        ("fsdp", {}, ParallelDims(data=6, replicas=2), 6),
        ("fsdp_tensor_parallel", {}, ParallelDims(data=3, tensor=2), 3),
        ("ddp_pipeline", {}, ParallelDims(data=3, pipeline=2), 3),
        ("context_parallel", {}, ParallelDims(data=3, context=2), 6),
    ):
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=6)
        try:
            make = Pipeline if dims.pipeline > 1 else base.Parallel
            parallel = make(default_options(name).model_copy(update=options), dims)
            parallel.net = torch.nn.Linear(1, 1)
            parallel.net.tensor_plan = {}
            module = torch.nn.Module()
            module.net, module.scale = parallel.net, torch.nn.Parameter(torch.ones(2))
            parallel.prepare(module, torch.optim.SGD(module.parameters()))
            module.scale.grad = torch.tensor([6.0, 12.0])
            parallel.finish_gradients()
        finally:
            dist.destroy_process_group()
        assert module.scale.grad.tolist() == [6 / n_ranks, 12 / n_ranks], (name, options)


def test_each_copy_of_the_net_is_sharded_over_neighbouring_ranks():
    """Two copies on eight ranks have four shards each."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    try:
        dims = ParallelDims(data=8, replicas=2)
        mesh = build_shard_mesh(build_mesh("cpu", dims), dims)
    finally:
        dist.destroy_process_group()
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_ranks_that_communicate_most_are_neighbours():
    dist.init_process_group("fake", store=dist.HashStore(), rank=2, world_size=12)
    try:
        dims = ParallelDims(pipeline=2, data=3, tensor=2)
        mesh = build_mesh("cpu", dims)
        groups = [mesh[axis].mesh.tolist() for axis in ("tensor", "data", "pipeline")]
        dims = ParallelDims(data=3, context=4)
        mesh = build_mesh("cpu", dims)
        groups += [mesh[axis].mesh.tolist() for axis in ("context", "data")]
        groups.append(build_shard_mesh(mesh, dims).mesh.tolist())
    finally:
        dist.destroy_process_group()
    assert groups[:3] == [[2, 3], [0, 2, 4], [2, 8]]
    assert groups[3:] == [[0, 1, 2, 3], [2, 6, 10], [*range(12)]]


@on_ranks(2)
def test_the_other_ranks_wait_at_the_end_until_rank_0_has_finished():
    store = dist.distributed_c10d._get_default_store()

    def finish():
        time.sleep(0.2)  # the other rank arrives first
        store.set("copied", "1")

    if dist.get_rank() == 1:  # rank 0 has called neither function
        with pytest.raises(TimeoutError):
            after_rank_0(list, 1, timeout_s=0.05)
        wait_for_rank_0(finish, 1, timeout_s=0.05)
    dist.barrier()

    def make_or_read():
        if dist.get_rank() == 0:
            time.sleep(0.2)
            store.set("made", "1")
        return store.check(["made"])

    assert after_rank_0(make_or_read, dist.get_rank(), timeout_s=30)
    wait_for_rank_0(finish, dist.get_rank(), timeout_s=30)
    assert store.check(["copied"])

    def fail():
        raise RuntimeError("the disk is full")

    if dist.get_rank() == 0:  # the errors of torch are RuntimeErrors, too
        with pytest.raises(RuntimeError, match="the disk is full"):
            wait_for_rank_0(fail, 0, timeout_s=30)
