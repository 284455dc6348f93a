"""Sharded saves when the disk of one of two ranks is full, by a real limit of the process."""

import errno
import resource
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gptrain.checkpoints.safe_load import SafeFileSystemReader, ShardWriter
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.writer import SaveFailedError
from gptrain.parallel.mesh import gather


@on_ranks(2)
def test_a_full_disk_on_one_rank_is_one_error_and_the_previous_checkpoint_loads():
    folder = gather(tempfile.mkdtemp())[0]
    mesh, full = init_device_mesh("cpu", (2,)), torch.arange(40000.0).reshape(200, 200)
    state = {"w": distribute_tensor(full, mesh, [Shard(0)]), "step": 3}
    store = CheckpointStore(folder, "a" * 32)

    def save(step, in_background):
        about = {"kind": "sharded", "rank": dist.get_rank(), "gather": gather}
        with store.writing(step, **about, in_background=in_background) as draft:
            dcp.save(state, storage_writer=ShardWriter(draft))
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
        assert failed.value.needed > 80000
    loaded = {"w": distribute_tensor(torch.zeros(200, 200), mesh, [Shard(1)]), "step": 0}
    (newest,) = Path(folder).iterdir()
    checkpoint = store.newest_intact()
    assert newest == checkpoint.path == store.folder / "step-00000003"
    assert (checkpoint.manifest["kind"], checkpoint.manifest["world_size"]) == ("sharded", 2)
    assert list(checkpoint.manifest["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    dcp.load(loaded, storage_reader=SafeFileSystemReader(newest))
    assert torch.equal(loaded["w"].full_tensor(), full) and loaded["step"] == 3
