"""Loading never runs foreign code: files, tensors, and the state of the generators."""

import contextlib
import os
import random
import warnings

import numpy
import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from gptrain.checkpoints import rng
from gptrain.checkpoints.files import SaveFailedError
from gptrain.checkpoints.store import CheckpointStore, DamagedCheckpointError, verify
from gptrain.checkpoints.tensors import SavedTensors, UnsafeCheckpointError, load_file
from tests.run import read_tensors

# One file


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


# Tensors


def test_torch_and_safetensors_read_the_tensors_of_a_checkpoint(tmp_path):
    """Also empty tensors, numbers, and dtypes whose sizes differ."""
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    more = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.arange(5), "c": torch.zeros(())}
    more |= {"d": torch.tensor([True]), "e": torch.rand(2, 3).T, "f": torch.zeros(0)}
    moments = {f"{n}.{k}": v for n, p in enumerate(optimizer.state.values()) for k, v in p.items()}
    store = CheckpointStore(tmp_path, "a" * 32)
    for in_background in (False, True):
        tensors = {"model": {**net.state_dict(), **more}, "optimizer": moments}
        store.save(7, tensors, {}, in_background=in_background)
        store.finish()
        path = store.newest_intact().path
        assert {*verify(path).manifest["files"]} == {
            "model.safetensors", "optimizer.safetensors", "state.ckpt"
        }  # fmt: skip
        loaded = read_tensors(path)
        assert loaded.keys() == {*tensors["model"], *moments}
        for kind, saved in tensors.items():
            direct = load_safetensors(path / f"{kind}.safetensors")
            mapped = SavedTensors(path, kind).full()
            for name, tensor in saved.items():
                for read in (loaded, direct, mapped):
                    assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    net.load_state_dict(load_safetensors(path / "model.safetensors"), strict=False)


def test_a_file_that_is_missing_or_of_another_save_is_found(tmp_path):
    net = {"w": torch.ones(4)}
    save_file(net, tmp_path / "model-00001-of-00002.safetensors", {
        "DCP_SHARDING_INFO": '{"w": {"saved_offsets": [4]}}'
    })  # fmt: skip
    with pytest.raises(DamagedCheckpointError, match="is one of 1 files"):
        SavedTensors(tmp_path)


def test_a_disk_that_fills_during_a_save_is_one_clean_exception(tmp_path):
    """Many sizes of the file are its limit."""
    resource = pytest.importorskip("resource")
    store, state = CheckpointStore(tmp_path, "a" * 32), {"w": torch.ones(3, 1 << 19)}  # 6 MiB
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 1, 100, 1 << 12, 1 << 20, 5 << 20):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            for tensors, rest in (({"model": state}, {}), ({}, state)):
                with pytest.raises(SaveFailedError):
                    store.save(1, tensors, rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
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
