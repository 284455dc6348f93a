"""result.json: why the run ended, and the versions and code that made it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import socket
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from gptrain.assemble.report import describe_run, read_git
from gptrain.checkpoints import timeline
from gptrain.checkpoints.files import read_rows
from gptrain.checkpoints.timeline import TIMES, describe, measure
from gptrain.lit.report import why_ended
from gptrain.runtime.devices import find_devices
from tests.command_line import compose_run
from tests.conftest import ROOT
from tests.tools.campaign.recovery import recovery_times

EARLY = "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss,"
NO_LIMIT = "+callbacks.timer={_target_: lightning.pytorch.callbacks.Timer}"  # measures only
EVERY_2 = ("trainer.max_steps=90", "trainer.val_check_interval=2")
STEPS_AT_WILL = ("trainer.max_steps=-1", "data.num_samples=8")  # 2 steps an epoch


def result(run) -> dict:
    assert run.code == 0, run.err
    return json.loads((run.folder / "result.json").read_text())


@pytest.mark.parametrize(
    ("words", "reason", "detail"),
    [
        ((*STEPS_AT_WILL,), "epochs done", "trainer.max_epochs=3"),
        ((*STEPS_AT_WILL, "max_tokens=200"), "tokens done", "max_tokens=200"),
        (("trainer.max_steps=-1", "trainer.max_time=00:00:00:01"), "max_time", r"at step \d+"),
        (
            (*EVERY_2, f"{EARLY} patience: 1, min_delta: 9}}", NO_LIMIT),
            "early stop",
            r"val/loss=5\.\d+ patience exhausted, at step 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_says_why_it_ended(train, words, reason, detail):
    run = train("scheduler=constant", *words)
    ended = result(run)["ended"]
    assert ended["reason"] == reason
    assert re.fullmatch(detail, ended["detail"])
    (line,) = (line for line in run.out.splitlines() if line.startswith("result "))
    assert line.endswith(f" · {reason}, {ended['detail']}")


def test_a_timer_or_an_early_stopping_has_ended_a_run_only_if_its_condition_holds():
    timer, waiting, stopped = Timer(), EarlyStopping("val/loss"), EarlyStopping("val/top5")
    trainer = SimpleNamespace(
        callbacks=[timer], early_stopping_callbacks=[waiting], global_step=3,
        callback_metrics={"val/loss": 7.0, "val/top5": torch.tensor(0.12345)},
        state=SimpleNamespace(fn="fit"),
    )  # fmt: skip
    for remaining_s, reason in ((0.5, "stopped"), (-0.1, "max_time"), (None, "stopped")):
        timer.time_remaining = lambda s=remaining_s: s
        ended = why_ended(trainer, SimpleNamespace(n_steps=9), 0)
        assert ended["reason"] == reason
    assert ended["detail"] == "by a callback or the module (trainer.should_stop), at step 3"
    stopped.stopping_reason = EarlyStoppingReason.STOPPING_THRESHOLD
    trainer.early_stopping_callbacks = [waiting, stopped]
    ended = why_ended(trainer, SimpleNamespace(n_steps=9), 2)
    assert ended == {
        "reason": "early stop", "detail": "val/top5=0.1235 stopping threshold, at step 3"
    }  # fmt: skip
    # The length of the run counts first, also if a callback asks to stop after the last step.
    steps = SimpleNamespace(n_steps=3, limit_kind="tokens", limit="max_tokens=12")
    assert why_ended(trainer, steps, 2) == {"reason": "tokens done", "detail": "max_tokens=12"}
    ended = why_ended(trainer, SimpleNamespace(n_steps=3), None)
    assert ended["reason"] == "nothing left to train" and "step 3 is the last" in ended["detail"]


HELD = 300_000_000
HOLDS_YAML = f"""
batch_size: 4
global_batch_size: null
seq_len: 17
num_workers: 0
train: {{_target_: held_data.Holds, hold_bytes: {HELD}}}
val: {{_target_: held_data.Holds}}
"""
HOLDS = """
import torch


class Holds(torch.utils.data.Dataset):
    def __init__(self, hold_bytes=0):
        self.held = torch.ones(hold_bytes, dtype=torch.uint8)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((16,), index), torch.full((16,), index)
"""


def test_the_peak_memory_of_a_run_counts_what_its_data_holds(train, tmp_path, monkeypatch):
    (tmp_path / "held_data.py").write_text(HOLDS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "holds.yaml").write_text(HOLDS_YAML)
    monkeypatch.syspath_prepend(tmp_path)
    run = train("--config-dir", str(tmp_path), "data=holds", "logger=none")
    made = result(run)
    (line,) = (line for line in run.out.splitlines() if line.startswith("result "))
    assert made["peak_memory_bytes"] > HELD and made["peak_memory_bytes"] % 1024 == 0
    assert f" · peak memory {made['peak_memory_bytes'] / 2**30:.2f} GiB · " in line


def test_an_evaluation_names_its_checkpoint(train):
    trained = train("trainer.max_steps=2")
    ended = result(train(f"from_run={trained.folder}", "task=test", name="test"))["ended"]
    assert ended["reason"] == "test done"
    assert ended["detail"] == f"of {trained.folder}/checkpoints/step-00000002"
    ended = result(train("task=validate", name="initial"))["ended"]
    assert ended["detail"] == "of the initial weights"


def test_a_result_says_what_it_was_made_by(train):
    words = ("trainer.max_steps=1", "seed=7")
    made = result(train(*words))
    assert made["ended"] == {"reason": "steps done", "detail": "trainer.max_steps=1"}
    assert {"seed=7", "trainer.max_steps=1"} <= set(made["overrides"])
    assert made["command"].startswith("python ") and made["command"].endswith(" ".join(words))
    assert made["versions"]["torch"] == torch.__version__
    assert made["host"] == socket.gethostname()
    assert made["devices"].startswith("1 x cpu (") and made["threads"] == 1
    assert made["tokens"] == 4 * 16 and made["seconds"] > 0
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert (made["git"] or {}).get("commit", "") == head


def phase(name: str, step: int, begin_s: float, end_s: float) -> dict:
    return {"phase": name, "step": step, "begin": begin_s, "time": end_s}


# A start that is killed at step 9 after a save of step 6, and a start that ends the run at step 12.
KILLED = [
    {"start": 0, "time": 100.0},
    phase("starting", 1, 100.0, 110.0),
    phase("steps", 6, 110.0, 115.0),
    phase("saves", 6, 115.0, 117.0),
    phase("steps", 9, 117.0, 120.0),
]
RESUMED = [
    {"start": 6, "time": 150.0},
    phase("starting", 7, 150.0, 158.0),
    phase("steps", 12, 158.0, 163.0),
    phase("validation", 12, 163.0, 167.0),
    {"end": 12, "time": 167.0},
]


def test_goodput_is_the_time_of_steps_that_count_over_all_starts():
    seconds = {"steps": 10, "validation": 4, "saves": 2, "starting": 18, "redone": 3,
               "between_starts": 30}  # fmt: skip
    assert seconds.keys() == set(TIMES)
    times = {f"{name}_s": value for name, value in seconds.items()}
    assert measure(KILLED + RESUMED) == {"goodput": round(10 / 67, 4), **times}
    extended = [{"start": 12, "time": 9000.0}, phase("steps", 13, 9000.0, 9001.0)]
    assert measure(KILLED + RESUMED + extended)["between_starts_s"] == 30  # the run was done
    assert measure(KILLED)["redone_s"] == 0  # nobody knows yet whether a start resumes
    # From the last line of the killed start to the end of step 10, the third of five steps.
    assert recovery_times(KILLED + RESUMED) == [158 + 3 - 120]
    assert recovery_times(KILLED + RESUMED[:2]) == []
    lost = [{"start": 6, "time": 130.0}, phase("starting", 7, 130.0, 135.0)]
    assert recovery_times(KILLED + lost + RESUMED) == [158 + 3 - 120]  # two starts are one recovery
    assert recovery_times(KILLED + RESUMED + extended) == [158 + 3 - 120]  # the run was done
    shown = describe({"goodput": 0.5, **times, "redone_s": 0.06, "saves_s": 0.04})
    assert shown.startswith("goodput 0.50 (10.0 s steps, ") and "0.1 s redone, " in shown
    assert "saves" not in shown
    set_back = [phase("steps", 1, 10.0, 14.0), phase("saves", 1, 14.0, 12.0)]
    set_back += [{"start": 1, "time": 9.0}, phase("steps", 2, 9.0, 11.0)]
    assert measure(set_back).items() >= {"goodput": 1.0, "steps_s": 6.0, "saves_s": 0.0}.items()
    assert measure([{"phase": "steps", "step": 1, "begin": [], "time": 3}, {"start": "x"}]) == {}
    assert measure([{"phase": "steps", "step": 1, "begin": 0.5, "time": 10**400}]) == {}


def test_the_first_start_begins_with_the_command_and_a_restart_when_it_is_recorded(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(timeline.time, "time", partial(next, itertools.count(10.0)))
    timeline.begin_command()
    for step in (0, 7):
        timeline.add_start(tmp_path, step)
    rows = read_rows(tmp_path / timeline.TIMELINE_NAME)
    assert rows == [{"start": 0, "time": 10.0}, {"start": 7, "time": 11.0}]
    recorded = timeline.Timeline(tmp_path)
    recorded.enter("validation", 8)
    with recorded.during("saves", 8):
        pass
    rows = read_rows(tmp_path / timeline.TIMELINE_NAME)[2:]
    assert [row["phase"] for row in rows] == ["starting", "validation", "saves"]
    for elapsed_s, step in ((9.0, 8), (10.0, 9)):  # a long phase has several lines
        monkeypatch.setattr(timeline.time, "time", partial(float, rows[-1]["time"] + elapsed_s))
        recorded.update(9)
        last = read_rows(tmp_path / timeline.TIMELINE_NAME)[-1]
        assert (last["phase"], last["step"]) == (("saves", 8), ("validation", 9))[step == 9]
    with pytest.raises(KeyError), recorded.during("saves", 9):
        raise KeyError  # ends the training, within this phase
    recorded.end(10)
    assert read_rows(tmp_path / timeline.TIMELINE_NAME)[-2]["phase"] == "saves"
    recorded.enter("saves", 11)
    assert recorded.end(11) == {}
    assert read_rows(tmp_path / timeline.TIMELINE_NAME)[-1]["end"] == 10


def test_the_times_of_all_starts_add_up_to_the_age_of_the_run(train):
    words = ("checkpoint=every_n_steps", "checkpoint.every_n_steps=1", "logger=none")
    words = (*words, "trainer.val_check_interval=2")
    first = train(*words, "trainer.max_steps=4")
    (first.folder / "result.json").unlink()
    shutil.rmtree(first.folder / "checkpoints/step-00000004")
    again = train(*words, "trainer.max_steps=6", "ckpt_path=last")
    made = result(again)
    rows = read_rows(again.folder / "timeline.jsonl")
    (done,) = [index for index, row in enumerate(rows) if "end" in row and row["end"] == 4]
    saves = {row["step"] for row in rows if row.get("phase") == "saves"}
    assert saves >= {1, 2, 3, 4, 5}  # also in the middle of the training
    started = rows[done + 1]
    assert started["start"] == 3
    phases = [row["phase"] for row in rows[done + 2 :] if "phase" in row]
    assert phases[:2] == ["starting", "steps"] and phases.count("starting") == 1
    assert phases[phases.index("validation") + 1] == "steps"  # between two validations
    assert phases[-1] == "saves"  # the end of the run trains no further
    age_s = rows[-1]["time"] - rows[0]["time"] - (started["time"] - rows[done]["time"])
    assert sum(made[f"{name}_s"] for name in TIMES) == pytest.approx(age_s, abs=0.1)
    assert made["redone_s"] > 0 and made["goodput"] == pytest.approx(
        made["steps_s"] / age_s, abs=0.05
    )
    (line,) = (line for line in again.out.splitlines() if line.startswith("result "))
    assert f" · goodput {made['goodput']:.2f} (" in line and " s starting" in line


def test_a_repository_is_dirty_with_a_change_or_a_new_file(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        me = ("-c", "user.name=me", "-c", "user.email=me@localhost")
        subprocess.run(["git", *me, *words], cwd=tmp_path, check=True, capture_output=True)

    def state() -> dict | None:
        return read_git.__wrapped__(tmp_path)

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert state() is None
    git("init")
    (tmp_path / "file").write_text("one")
    assert state()["dirty"] is True
    git("add", "file")
    git("commit", "-m", "one")
    assert state()["dirty"] is False and len(state()["commit"]) == 40
    # A result has the commit of the project, which may be outside of the library's repository.
    devices = find_devices(compose_run("trainer=cpu"))
    monkeypatch.setenv("GPTRAIN_CONF", str(tmp_path / "conf"))
    assert describe_run(devices)["git"] == state()
    (tmp_path / "file").write_text("two")
    assert state()["dirty"] is True
    monkeypatch.setenv("PATH", "")
    assert state() is None
