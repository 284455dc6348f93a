"""Fully sharded data parallelism on two ranks equals one process."""

import warnings
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from count_bytes import CountBytes
from kinds import (
    Sharded,
    check_equals_one_process,
    check_recomputed_equals_one_process,
    fraction_of_bytes,
)
from ranks import on_ranks

from gptrain.parallel.activation import apply_compile
from gptrain.parallel.dims import ParallelDims
from gptrain.parallel.mesh import build_mesh, build_shard_mesh


@on_ranks(2)
def test_fsdp_equals_one_process():
    check_equals_one_process(Sharded(data=2))


@on_ranks(2)
def test_without_resharding_it_equals_one_process_and_gathers_each_block_once():
    """Each of four blocks is gathered forward, and again backward where it was resharded."""
    gathers = {}
    for reshards in (True, False):
        kind = Sharded(data=2, reshard_after_forward=reshards)
        check_equals_one_process(kind, n_steps=2)
        with CountBytes() as counted:
            kind.step(2)
        gathers[reshards] = counted.calls["allgather_base"]
    n_root, n_micro_steps = 1, 2
    assert gathers == {True: n_micro_steps * (8 + n_root), False: n_micro_steps * (4 + n_root)}


@on_ranks(2)
def test_each_rank_holds_half_of_the_bytes():
    assert fraction_of_bytes(Sharded(data=2)) < 0.5 * 1.1


@on_ranks(2)
def test_activation_checkpointing_changes_no_number():
    check_recomputed_equals_one_process(data=2)


@on_ranks(2)
def test_compiled_blocks_equal_one_process():
    """As they are traced; the code that is then made of it is torch's own and takes ten seconds."""
    compiled = partial(torch.compile, backend="eager")
    with warnings.catch_warnings(), patch.object(torch, "compile", compiled):
        warnings.simplefilter("ignore")  # the compiler's own, of which it has many
        kind = Sharded(data=2, prepare=lambda net: apply_compile(net, "blocks"))
        check_equals_one_process(kind, n_steps=1)


def test_copies_of_the_net_are_sharded_over_neighbours():
    """Two copies on eight ranks: four shards of each, not two shards of four copies."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    try:
        dims = ParallelDims(data=8, replicas=2)
        mesh = build_shard_mesh(build_mesh("cpu", dims), dims)
    finally:
        dist.destroy_process_group()
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
