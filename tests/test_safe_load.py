"""Loading never runs foreign code: files and tensors."""

import contextlib
import random

import pytest
import torch
from safetensors.torch import load_file as load_safetensors
from safetensors.torch import save_file

from gptrain.checkpoints.store import CheckpointStore, DamagedCheckpointError, verify
from gptrain.checkpoints.tensors import SavedTensors, UnsafeCheckpointError, load_file
from tests.run import read_tensors


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
