"""Every command of the README works; for the files that it shows see test_strip.py."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import refused
from tests.conftest import ROOT
from tests.forked import forked_ranks

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()]
TRAIN = [
    command.removeprefix(".venv/bin/")
    for line in COMMANDS
    for command in line.split(" && ")
    if "python train.py" in command
]
# Said last, so it wins: the same command on a net and a machine of a test's size.
SMALL = [
    "trainer.accelerator=cpu", "model.d_model=16", "trainer.max_steps=2", "data.batch_size=2",
    "data.seq_len=17", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.enable_progress_bar=false",
]  # fmt: skip
SMALL_GPT = [
    "model.n_heads=2",
    "model.n_layers=2",
    "model.vocab_size=256",
    "trainer.precision=32-true",
]


def small(words: list[str]) -> list[str]:
    """The options of a command, followed by those that make it small."""
    if "--help" in words or "--cfg" in words:
        return words
    gpt = [] if "model=my_lstm" in words else SMALL_GPT
    steps = [f"trainer.max_steps={4 if 'ckpt_path=last' in words else 2}"]
    ranks = ["trainer.devices=2"] if any("devices=" in word for word in words) else []
    data = ["data.path=" + str(ROOT / "src")] if "experiment=quickstart" in words else []
    trials = ["hydra.sweeper.n_trials=2"] if "hparams_search=optuna" in words else []
    return [*words, *SMALL, *gpt, *steps, *ranks, *data, *trials]


def run_train(words: list[str], monkeypatch, said: Path) -> int:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "train.py"), *small(words)])
    with forked_ranks(said, said):
        return exit_code(lambda: runpy.run_path(str(ROOT / "train.py"), run_name="__main__"))


def exit_code(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as left:
        return left.code or 0
    return 0


def test_every_train_command_runs(tmp_path, monkeypatch, capfd):
    """In the order of the README: some go on with the run of the one before."""
    for extra in ("optuna", "safetensors"):
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    commands = [command for command in TRAIN if "my_lstm" not in command]
    assert len(commands) > 8
    said = tmp_path / "said"  # by ranks
    for number, command in enumerate(commands):
        words = shlex.split(command)[2:]
        if not any(word.startswith(("run_dir=", "--")) for word in words):
            words.append(f"run_dir={tmp_path / str(number)}")  # a second later it is another one
        code = run_train(words, monkeypatch, said)
        assert code == 0, (command, capfd.readouterr(), said.exists() and said.read_text())
    (export,) = [shlex.split(command) for command in COMMANDS if "gptrain.export" in command]
    monkeypatch.setattr(sys, "argv", export[2:])
    assert exit_code(lambda: runpy.run_module(export[2], run_name="__main__")) == 0


def test_the_answer_to_a_wrong_option_is_as_shown():
    (shown,) = re.findall(r"```\n\$ python train.py (.*)\n([^`]*)```", README)
    assert "\n".join(refused(*shown[0].split())) == shown[1].strip()


def test_every_other_command_is_known():
    """Set-up and tests are run by CI as written; the others are tools of their own."""
    others = [command for command in COMMANDS if command and "train.py" not in command]
    known = ("python3 -m venv", "tensorboard --logdir", "python -m gptrain.")
    assert all(command.startswith(known) for command in others), others
