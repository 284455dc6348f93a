"""Every choice of every group composes, and every part of it can be built."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from gptrain.config import compose_command
from tests.conftest import ROOT

CONF = ROOT / "conf"
REQUIRED = {"tokens": ("data.train_path=train.bin", "data.val_path=val.bin")}
CHOICES = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name != "local"
]


@pytest.mark.parametrize("group, choice", CHOICES, ids=[f"{g}/{c}" for g, c in CHOICES])
def test_a_choice_composes_and_every_reference_in_it_resolves(group, choice):
    if choice == "optuna":
        pytest.importorskip("optuna")
    cfg = compose_command([f"{group}={choice}", *REQUIRED.get(choice, ())])
    OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.parametrize("choice", ["quickstart", "simple_gpt_ddp", "gpt2_124m"])
def test_an_experiment_goes_through_every_part_once(train, tmp_path, choice):
    if choice == "gpt2_124m":
        pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 800)
    small = [
        f"experiment={choice}", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
        "model.vocab_size=300", "data.seq_len=16", "data.batch_size=2", "trainer.accelerator=cpu",
        "trainer.devices=1", "trainer.fast_dev_run=true", "data.global_batch_size=null",
    ]  # fmt: skip
    if choice != "simple_gpt_ddp":
        small += [f"data.path={text}"]
    run = train(*small, tiny=False)
    assert run.code == 0, run.err
