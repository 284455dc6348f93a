"""A start from weights alone: step 0, a fresh optimizer, new data."""

from __future__ import annotations

import warnings

import pytest
import torch

import gptrain
from gptrain.resilience.manifest import read_manifest

STILL = ("trainer.max_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "logger=none")


def assert_equal(state, expected) -> None:
    """But for a step of the learning rate of STILL."""
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


def test_a_run_and_the_file_in_its_checkpoint_are_starts(train, saved_twice):
    checkpoint = saved_twice.folder / "checkpoints" / "step-00000004"
    for source, mode in ((saved_twice.folder, "max"), (checkpoint / "state.ckpt", "min")):
        words = (f"init_from='{source}'", f"checkpoint.mode={mode}", "seed=7")
        begun = train(*STILL, *words, name=f"begun {mode}")
        assert begun.code == 0, begun.err
        assert_equal(begun.state(1)["state_dict"], saved_twice.state(4)["state_dict"])
        moments = begun.state(1)["optimizer_states"][0]["state"]
        assert {int(entry["step"]) for entry in moments.values()} == {1}
        assert begun.out.startswith("start ")


def test_a_spread_net_takes_its_slices_and_its_shards_load_like_a_whole_net(train, saved_twice):
    shards = train(*STILL, f"init_from='{saved_twice.folder}'", "strategy=fsdp", name="shards")
    assert shards.code == 0, shards.err
    assert read_manifest(shards.folder / "checkpoints" / "step-00000001")["kind"] == "sharded"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = gptrain.load(shards.folder)
    assert_equal(net.state_dict(), saved_twice.state(2)["state_dict"])


def test_a_shape_that_does_not_fit_is_one_line_that_names_both_sides(train, saved_twice):
    begun = train(*STILL, f"init_from='{saved_twice.folder}'", "model.d_model=16", name="narrow")
    assert begun.code == 65
    (line,) = begun.err.splitlines()
    assert "token_embedding.weight (256, 32) there, (256, 16) here" in line
    deeper = train(*STILL, f"init_from='{saved_twice.folder}'", "model.n_layers=3", name="deep")
    assert "blocks.2.norm_1.weight here only" in deeper.err and deeper.err.count("\n") == 1


def test_what_is_no_safetensors_file_is_told(train, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"not one of these")
    damaged = train(*STILL, f"init_from={tmp_path / 'no.safetensors'}")
    assert damaged.code == 65 and "not a safetensors file" in damaged.err


def test_what_is_not_there_or_damaged_is_told_by_its_code(train, saved_twice, tmp_path):
    missing = train(*STILL, f"init_from={tmp_path / 'nothing'}", name="missing")
    assert missing.code == 66 and not missing.folder.exists()
    (tmp_path / "empty").mkdir()
    empty = train(*STILL, f"init_from={tmp_path / 'empty'}", name="begun")
    assert empty.code == 66 and "no weights in it" in empty.err
    (tmp_path / "readme").write_text("# no checkpoint")
    other = train(*STILL, f"init_from={tmp_path}/readme", name="fourth")
    (line,) = [line for line in other.err.splitlines() if line.startswith("error")]
    assert other.code == 65 and "readme: not a checkpoint (" in line
    assert line.count("/readme") == 1 and "weights_only" not in other.err
    both = train(*STILL, f"init_from='{saved_twice.folder}'", "ckpt_path=last", name="both")
    assert both.code == 2 and "excludes ckpt_path" in both.err
