"""The data, the lengths and the vocabulary that a choice gives a run, and the keys of its yaml."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT

CONFS = (ROOT / "conf", ROOT / "src" / "gptrain" / "conf")


@pytest.mark.parametrize("choice", ["quickstart", "simple_gpt_ddp"])
def test_an_experiment_goes_through_every_part_once(train, tmp_path, choice):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 800)
    small = [
        f"experiment={choice}", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
        "model.vocab_size=300", "data.seq_len=16", "data.batch_size=2", "trainer.accelerator=cpu",
        "trainer.devices=1", "trainer.fast_dev_run=true", "data.global_batch_size=null",
    ]  # fmt: skip
    if choice == "quickstart":
        small += ["model.n_kv_heads=1", "model.d_ff=64", f"data.path={text}"]
    run = train(*small, tiny=False)
    assert run.code == 0, run.err
    assert "test/loss" in run.out and "val/loss" in run.out
    kept = {path.name for path in run.folder.iterdir()}
    assert not kept & {"checkpoints", "result.json"}
    assert not [name for name in kept if name.startswith("events")]
