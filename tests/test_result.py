"""result.json: why the run ended, and the versions and code that made it."""

from __future__ import annotations

import socket
import subprocess

import pytest
import torch

from gptrain.checkpoints.files import read_rows
from gptrain.checkpoints.timeline import TIMES, describe, measure
from tests.conftest import ROOT, TINY
from tests.run import train as run_train


def test_a_result_says_what_it_was_made_by():
    made = run_train(*TINY, "trainer.max_steps=1", "seed=7").result
    assert made["ended"] == {"reason": "steps done", "detail": "trainer.max_steps=1"}
    assert {"seed=7", "trainer.max_steps=1"} <= set(made["overrides"])
    assert made["command"].startswith("python ") and " seed=7" in made["command"]
    assert made["versions"]["torch"] == torch.__version__
    assert made["host"] == socket.gethostname()
    assert made["devices"].startswith("1 x cpu (") and made["threads"] == 1
    assert made["tokens"] == 4 * 16 and made["seconds"] > 0
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert (made["git"] or {}).get("commit", "") == head


def phase(name: str, step: int, end_s: float) -> dict:
    return {"phase": name, "step": step, "time": end_s}


# A start that is killed at step 9 after a save of step 6, and a start that ends the run at step 12.
KILLED = [
    {"start": 0, "time": 100.0},
    phase("starting", 1, 110.0),
    phase("steps", 6, 115.0),
    phase("saves", 6, 117.0),
    phase("steps", 9, 120.0),
]
RESUMED = [
    {"start": 6, "time": 150.0},
    phase("starting", 7, 158.0),
    phase("steps", 12, 163.0),
    phase("validation", 12, 167.0),
    {"end": 12, "time": 167.0},
]


def test_goodput_is_the_time_of_steps_that_count_over_all_starts():
    seconds = {"steps": 10, "validation": 4, "saves": 2, "starting": 18, "redone": 3,
               "between_starts": 30}  # fmt: skip
    assert seconds.keys() == set(TIMES)
    times = {f"{name}_s": value for name, value in seconds.items()}
    assert measure(KILLED + RESUMED) == {"goodput": round(10 / 67, 4), **times}
    extended = [{"start": 12, "time": 9000.0}, phase("steps", 13, 9001.0)]
    assert measure(KILLED + RESUMED + extended)["between_starts_s"] == 30  # the run was done
    assert measure(KILLED)["redone_s"] == 0  # nobody knows yet whether a start resumes
    shown = describe({"goodput": 0.5, **times, "redone_s": 0.06, "saves_s": 0.04})
    assert shown.startswith("goodput 0.50 (10.0 s steps, ") and "0.1 s redone, " in shown
    assert "saves" not in shown
    set_back = [{"start": 0, "time": 10.0}, phase("steps", 1, 14.0), phase("saves", 1, 12.0)]
    set_back += [{"start": 1, "time": 9.0}, phase("steps", 2, 11.0)]
    assert measure(set_back).items() >= {"goodput": 1.0, "steps_s": 6.0, "saves_s": 0.0}.items()


def test_the_times_of_all_starts_add_up_to_the_age_of_the_run(train):
    words = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=1", "logger=none")
    words = (*words, "trainer.val_check_interval=2")
    train(*words, "trainer.max_steps=4").cut_back(3)
    again = train(*words, "trainer.max_steps=6", "ckpt_path=last")
    made = again.result
    rows = read_rows(again.folder / "timeline.jsonl")
    (done,) = [index for index, row in enumerate(rows) if row.get("end") == 4]
    started = rows[done + 1]
    assert started["start"] == 3
    phases = [row["phase"] for row in rows[done + 2 :] if "phase" in row]
    assert phases[:2] == ["starting", "steps"] and phases.count("starting") == 1
    assert phases[-1] == "saves"  # the end of the run trains no further
    age_s = rows[-1]["time"] - rows[0]["time"] - (started["time"] - rows[done]["time"])
    assert sum(made[f"{name}_s"] for name in TIMES) == pytest.approx(age_s, abs=0.1)
    assert made["redone_s"] > 0 and made["goodput"] > 0
    (line,) = (line for line in again.out.splitlines() if line.startswith("result "))
    assert f" · goodput {made['goodput']:.2f} (" in line and " s starting" in line
