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


def test_what_contradicts_the_run_is_one_line_that_names_both_sides(train, saved_twice):
    begun = train(*STILL, f"init_from='{saved_twice.folder}'", "model.d_model=16", name="narrow")
    assert begun.code == 65
    (line,) = begun.err.splitlines()
    assert "token_embedding.weight (256, 32) there, (256, 16) here" in line
    both = train(*STILL, f"init_from='{saved_twice.folder}'", "ckpt_path=last", name="both")
    assert both.code == 2 and "excludes ckpt_path" in both.err
    deeper = train(*STILL, f"init_from='{saved_twice.folder}'", "model.n_layers=3", name="deep")
    assert "blocks.2.norm_1.weight here only" in deeper.err and deeper.err.count("\n") == 1


@pytest.mark.parametrize(
    "name, code, said",
    [
        ("nothing", 66, "no such file or folder"),
        ("", 66, "no weights in it"),
        ("no.safetensors", 65, "not a safetensors file"),
        ("readme", 65, "readme: not a checkpoint ("),
    ],
)
def test_what_is_not_there_or_damaged_is_one_line_with_its_code(train, tmp_path, name, code, said):
    for file in ("no.safetensors", "readme"):
        (tmp_path / file).write_text("# not one of these")
    run = train(*STILL, f"init_from={tmp_path / name}")
    (line,) = [line for line in run.err.splitlines() if line.startswith("error")]
    assert run.code == code and said in line and line.count("/readme") <= 1
    assert "weights_only" not in run.err
