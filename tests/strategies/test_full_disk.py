"""Sharded saves that fail on one of two ranks, for example by a real limit of its disk space."""

import errno
import resource
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gptrain.checkpoints.files import SaveFailedError
from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import MODEL, SavedTensors
from gptrain.parallel.mesh import gather
from tests.strategies.ranks import on_ranks


@on_ranks(2)
def test_a_full_disk_on_one_rank_is_one_error_and_the_previous_checkpoint_loads():
    folder = gather(tempfile.mkdtemp())[0]
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(40000.0).reshape(200, 200)
    tensors = {MODEL: {"w": distribute_tensor(full, mesh, [Shard(0)])}}
    store = CheckpointStore(folder, "a" * 32, rank=dist.get_rank(), gather=gather)

    def save(step, in_background):
        store.save(step, tensors, {"step": step}, in_background=in_background)
        store.finish()

    save(3, in_background=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for bad_ranks, in_background in product(({0}, {1}, {0, 1}), (True, False)):
        if dist.get_rank() in bad_ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9999, limits[1]))
        with pytest.raises(SaveFailedError) as failed:
            save(4, in_background)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (failed.value.errno, failed.value.rank) == (errno.EFBIG, min(bad_ranks))
    loaded = distribute_tensor(torch.zeros(200, 200), mesh, [Shard(1)])
    (newest,) = Path(folder).iterdir()
    assert newest == store.newest_intact() == store.folder / "step-00000003"
    names = [f"model-0000{number}.safetensors" for number in (0, 1)]
    assert list(read_manifest(newest).files) == [*names, "state.ckpt"]
    SavedTensors(newest).read({"w": loaded})
    assert torch.equal(loaded.full_tensor(), full)
    longer = distribute_tensor(torch.zeros(250, 200), mesh, [Shard(0)])
    for source in (newest, {"w": full}):
        SavedTensors(source).read({"w": longer.zero_()})
        assert torch.equal(longer.full_tensor(), torch.cat([full, torch.zeros(50, 200)]))


@on_ranks(2)
def test_any_error_of_one_rank_fails_the_save_on_all_ranks():
    rank = dist.get_rank()
    store = CheckpointStore(gather(tempfile.mkdtemp())[0], "a" * 32, rank=rank, gather=gather)
    for bad_rank, in_background in product((0, 1), (True, False)):
        refused = {"x": torch.zeros(2, dtype=torch.complex128)}  # has no name in safetensors
        tensors = refused if rank == bad_rank else {"w": torch.zeros(2)}
        with pytest.raises(RuntimeError, match=f"rank {bad_rank} .*complex128"):
            store.save(1, {MODEL: tensors}, {}, in_background=in_background)
            store.finish()
        with pytest.raises(RuntimeError, match="pickle"):
            store.save(1, {MODEL: {}}, [lambda: rank])
        dist.barrier()
        assert gather([*store.folder.iterdir()]) == [[], []]
