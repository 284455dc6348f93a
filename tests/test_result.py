"""result.json: why the run ended, and the versions and code that made it."""

from __future__ import annotations

import subprocess

import pytest
import torch

from gptrain.checkpoints.goodput import ENTRIES, TIMES, describe, measure
from gptrain.checkpoints.manifest import read_manifest
from tests.conftest import ROOT, TINY
from tests.run import train as run_train


def test_a_result_says_what_it_was_made_by():
    made = run_train(*TINY, "trainer.max_steps=1").result
    assert made["versions"]["torch"] == torch.__version__
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert (made["git"] or {}).get("commit", "") == head


def test_goodput_is_the_time_of_steps_that_count_over_all_starts():
    seconds = {"import": 8, "first step": 10, "train": 10, "validate": 4, "save": 1, "end": 1}
    seconds |= {"lost": 33.0}
    times = {"steps_s": 10, "validation_s": 4, "saves_s": 2, "starting_s": 18, "lost_s": 33}
    assert measure(seconds) == {"goodput": round(10 / 67, 4), **times}
    assert {*measure(seconds)} == {*ENTRIES} and measure({"import": 3.0}) == {}
    shown = describe({"goodput": 0.5, **times, "lost_s": 0.06, "saves_s": 0.04})
    assert shown.startswith("goodput 0.50 (10.0 s steps, ") and "0.1 s lost" in shown
    assert "saves" not in shown


def test_the_times_of_all_starts_add_up_to_the_age_of_the_run(train):
    """From the first start to the end, without the time after a run has reached its own end."""
    words = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=1", "logger=none")
    words = (*words, "trainer.val_check_interval=2")
    first = train(*words, "trainer.max_steps=4")
    first.cut_back(3)
    (first.folder / "status.json").unlink()  # it was killed
    saved = read_manifest(first.checkpoints[-1])
    again = train(*words, "trainer.max_steps=6", "ckpt_path=last")
    age_s = (again.folder / "result.json").stat().st_mtime - saved.saved_at
    age_s += sum(saved.phase_s.values())
    made = again.result
    # The record of the start is written in a time that does not count.
    assert sum(made[f"{kind}_s"] for kind in TIMES) == pytest.approx(age_s, abs=1)
    assert made["lost_s"] > 0 and made["goodput"] > 0
    (line,) = (line for line in again.out.splitlines() if line.startswith("result "))
    assert f" · goodput {made['goodput']:.2f} (" in line and " s starting" in line
    trained_s = read_manifest(again.checkpoints[-1]).phase_s["train"]
    longer = train(*words, "trainer.max_steps=7", "ckpt_path=last").result
    assert longer["lost_s"] == made["lost_s"] and longer["steps_s"] > trained_s
