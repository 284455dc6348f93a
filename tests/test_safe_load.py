"""Loading never runs foreign code: files, sharded folders, and the state of the generators."""

import contextlib
import io
import os
import pickle
import random
import warnings
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, metadata

from gptrain.checkpoints import rng
from gptrain.checkpoints.manifest import DamagedCheckpointError, verify
from gptrain.checkpoints.safe_load import (
    SafeFileSystemReader,
    ShardWriter,
    UnsafeCheckpointError,
    load_file,
)
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.writer import SaveFailedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Attack:
    """Runs a command when it is unpickled freely."""

    def __init__(self, mark) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def mark(tmp_path):
    """A file that exists afterwards if foreign code ran."""
    path = tmp_path / "foreign code ran"
    yield path
    assert not path.exists()


def is_mapped(path) -> bool:
    """Return whether a file is mapped into the memory of this process, True outside Linux."""
    maps = Path("/proc/self/maps")
    return not maps.exists() or str(path) in maps.read_text()


# One file


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_and_plain_values_come_back(tmp_path, mmap):
    state = {"w": torch.randn(3, 4), "step": 5, "betas": (0.9, 0.95), "name": "x", "none": None}
    torch.save(state, tmp_path / "state.ckpt")
    loaded = load_file(tmp_path / "state.ckpt", mmap=mmap)
    assert is_mapped(tmp_path / "state.ckpt") or not mmap
    assert torch.equal(loaded.pop("w"), state.pop("w")) and loaded == state


def write_pickle(state, path):
    path.write_bytes(pickle.dumps(state, protocol=2))


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(
    "write", [torch.save, partial(torch.save, _use_new_zipfile_serialization=False), write_pickle]
)
def test_a_file_with_foreign_code_is_refused_and_the_code_named(
    tmp_path, mark, write, mmap, monkeypatch
):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # for files that one trusts
    write({"config": [1, Attack(mark)], "w": torch.ones(2)}, tmp_path / "x.ckpt")
    with pytest.raises(UnsafeCheckpointError, match=r"x\.ckpt: contains os\.system; refused"):
        load_file(tmp_path / "x.ckpt", mmap=mmap)


def test_flipped_bits_in_an_unverified_file_raise_one_of_two_errors(tmp_path):
    torch.save({"w": torch.ones(9), "step": 3}, tmp_path / "x.ckpt")
    good, draw = (tmp_path / "x.ckpt").read_bytes(), random.Random(0)
    for _ in range(200):
        bad = bytearray(good)
        for _ in range(draw.randrange(1, 9)):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        (tmp_path / "x.ckpt").write_bytes(bad)
        with contextlib.suppress(UnsafeCheckpointError, DamagedCheckpointError):
            load_file(tmp_path / "x.ckpt")


def cut() -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(1000)}, buffer)
    return buffer.getvalue()[:2000]


@pytest.mark.parametrize(
    "data",
    [b"", b"# A readme\n", b"\x80\x04.", b"PK\x03\x04" + b"x" * 99, cut(),
     pickle.dumps(Attack("code that torch cannot read"), protocol=4)],
)  # fmt: skip
def test_a_file_that_is_no_checkpoint_is_called_that(tmp_path, data):
    (tmp_path / "x.ckpt").write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=r"x\.ckpt: not a checkpoint") as refused:
        load_file(tmp_path / "x.ckpt")
    assert "weights_only" not in str(refused.value)
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "missing")


# A folder of torch.distributed.checkpoint


def trained() -> dict:
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    values = {"step": 7, "betas": (0.9, 0.95), "history": [1.5, torch.arange(3)], "half": None}
    half = {"half": torch.ones(2, 2, dtype=torch.bfloat16)}
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), **values, **half}


def save_shards(folder, state, in_background=False):
    store = CheckpointStore(folder, "a" * 32)
    with store.writing(7, kind="sharded", in_background=in_background) as draft:
        shards = ShardWriter(draft)
        assert shards.per_thread_copy_ahead == 0  # such copies of a GPU's tensors stay in memory
        dcp.save(state, storage_writer=shards)
    store.finish()
    return store.newest_intact().path


def blank(state):
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(blank(value) for value in state)
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def read(reader, saved: dict) -> dict:
    loaded = blank(saved)
    dcp.load(loaded, storage_reader=reader)
    return loaded


def flat(state) -> list:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@pytest.mark.parametrize("in_background", [False, True])
def test_shards_in_a_draft_are_a_checkpoint_that_torch_reads_too(tmp_path, in_background):
    saved = trained()
    path = save_shards(tmp_path, saved, in_background)
    assert set(verify(path)["files"]) == {".metadata", "__0_0.distcp"}
    for reader in (SafeFileSystemReader, FileSystemReader):
        assert flat(read(reader(path), saved)) == flat(saved)


def test_files_written_by_torch_save_are_read(tmp_path):
    saved = trained()
    dcp.save(saved, checkpoint_id=tmp_path / "plain")
    assert flat(read(SafeFileSystemReader(tmp_path / "plain"), saved)) == flat(saved)


def test_an_index_that_python_3_11_2_wrote_is_read(tmp_path, monkeypatch):
    """Python 3.11.2 writes a member of an enum as `getattr(class, name)`; only members are read."""
    saved = trained()
    index = save_shards(tmp_path, saved) / ".metadata"
    content, kind = pickle.loads(index.read_bytes()), metadata._MEM_FORMAT_ENCODING

    def write(of, name):
        monkeypatch.setattr(kind, "__reduce_ex__", lambda *_: (getattr, (of, name)), raising=False)
        index.write_bytes(pickle.dumps(content))

    write(kind, "TORCH_CONTIGUOUS_FORMAT")
    loaded = blank(saved)
    dcp.load(loaded, storage_reader=SafeFileSystemReader(index.parent))
    assert flat(loaded) == flat(saved)
    write(metadata.Metadata, "__init__")
    with pytest.raises(DamagedCheckpointError, match="not a checkpoint"):
        SafeFileSystemReader(index.parent).read_metadata()


def test_a_disk_that_fills_during_torch_save_or_a_sharded_save_is_one_clean_exception(tmp_path):
    """A limit of the file size at many sizes must not cause an error that escapes from C++."""
    resource = pytest.importorskip("resource")
    store, state = CheckpointStore(tmp_path, "a" * 32), {"w": torch.ones(3, 1 << 19)}  # 6 MiB
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, 100, 1 << 12, 1 << 20, 5 << 20):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(SaveFailedError), store.writing(1) as draft, draft.open("x") as file:
                torch.save(state, file)
            with pytest.raises(SaveFailedError) as failed, store.writing(1) as draft:
                dcp.save(state, storage_writer=ShardWriter(draft))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert failed.value.needed > 6 << 20
        assert os.listdir(tmp_path) == []


# Generators


def draw_from_all() -> list:
    of_python = random.random(), random.gauss(0, 1)
    of_numpy = numpy.random.rand(), numpy.random.standard_normal()
    return [*of_python, *of_numpy, *torch.rand(3).tolist(), torch.randn(1).item()]


def test_every_random_generator_resumes_bit_for_bit_after_a_safe_load(tmp_path):
    draw_from_all()  # leaves the second number of a gaussian pair behind in Python and NumPy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(rng.capture(), tmp_path / "rng")
    expected = [draw_from_all() for _ in range(3)]
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    state = load_file(tmp_path / "rng")
    rng.restore(state | {"a device that this machine does not have": torch.zeros(1)})
    assert [draw_from_all() for _ in range(3)] == expected
