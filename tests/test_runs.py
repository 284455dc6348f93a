"""`python -m gptrain.runs` on folders of finished, crashed and untrusted runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path

import pytest
import yaml

from gptrain.checkpoints.manifest import read_manifest
from gptrain.runs.__main__ import main
from gptrain.runs.table import read_run


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_run(folder: Path, *overrides: str, loss: float | None = None, **facts) -> Path:
    """Write the records of a run, without a result if `loss` is None, and return its folder."""
    write(folder / ".hydra/overrides.yaml", yaml.safe_dump([*overrides]))
    config = {"objective": facts.pop("objective", "val/loss")}
    config |= {"checkpoint": {"mode": facts.pop("mode", "min")}}
    lr = next((float(o.split("=")[1]) for o in overrides if o.startswith("optimizer.lr")), 3e-4)
    config |= {"optimizer": {"lr": lr}, "run_dir": str(folder)}
    write(folder / ".hydra/config.yaml", yaml.safe_dump(config))
    status = {"cause": "done", "exit_code": 0} | facts.pop("status", {})
    if status["cause"] != "killed":  # a run that was killed by SIGKILL writes no status
        write(folder / "status.json", json.dumps(status))
    if loss is not None:
        result = {"metrics": {"val/loss": loss}, "steps": 10, "seconds": 1.5} | facts
        write(folder / "result.json", json.dumps(result))
    return folder


@pytest.fixture
def show(typed):
    """Return a function that runs the command: exit code, lines on stdout, lines on stderr."""

    def run(*words: object) -> tuple[int, list[str], list[str]]:
        code, out, err = typed(main, *map(str, words))
        return code, out.splitlines(), err.splitlines()

    return run


@pytest.fixture
def four(tmp_path) -> Path:
    """Two that are done, of which one stopped early, one that failed and one that was lost."""
    stop = {"reason": "early stop", "detail": "val/loss=3.5 not better than 3.4, at step 10"}
    make_run(tmp_path / "a", "model=gpt_nano", "optimizer.lr=1e-3", loss=3.5, ended=stop)
    make_run(tmp_path / "sweep" / "0", "model=gpt_nano", "optimizer.lr=0.01", loss=2.5)
    failed = {"cause": "nonfinite", "exit_code": 79, "step": 7, "message": "error: the loss is nan"}
    make_run(tmp_path / "sweep" / "1", "model=gpt_nano", "optimizer.lr=9", status=failed)
    make_run(tmp_path / "sweep" / "10", "model=gpt_nano", status={"cause": "killed"})
    return tmp_path


def test_the_best_run_is_first_and_what_varied_is_shown(four, show, monkeypatch):
    write(four / "export/.hydra/config.yaml", "model: {}")  # an export is not a run
    code, lines, err = show(four)
    assert code == 0 and not err and len(lines) == 5
    monkeypatch.setenv("GPTRAIN_OUTPUT_DIR", str(four))
    assert show()[1] == show(four, four / "a")[1] == lines  # a run is shown once
    assert lines[0].split() == ["run", "optimizer.lr", "val/loss", "steps", "seconds", "ended"]
    assert [line.split()[0] for line in lines[1:]] == ["sweep/0", "a", "sweep/1", "sweep/10"]
    assert lines[2].endswith("early stop: val/loss=3.5 not better than 3.4, at step 10")
    assert lines[3].split(maxsplit=3) == ["sweep/1", "9", "7", "nonfinite: the loss is nan"]
    assert lines[4].split() == ["sweep/10", "lost"]
    make_run(four / "longer", f"note={'a' * 40}", loss=9.0, steps=12)
    lines = show(four)[1]
    assert re.search(r" a{32} ", "\n".join(lines))  # a long value is cut


def test_json_is_a_list_and_its_direction_that_of_the_runs(four, show):
    last = make_run(four / "z", "optimizer.lr=1e-3", "+x=1", loss=3.0, mode="max")
    code, lines, _ = show(four, "--json")
    runs = json.loads("\n".join(lines))
    assert code == 0 and [Path(run["run"]).name for run in runs][:3] == ["a", "z", "0"]
    assert runs[1] == {
        "run": str(last), "overrides": ["optimizer.lr=1e-3", "+x=1"],
        "metrics": {"val/loss": 3.0}, "steps": 10, "seconds": 1.5, "ended": "done",
    }  # fmt: skip
    metrics = {"val/loss": 3.0, "mine/score": 0.5}
    make_run(four / "zz", loss=3.0, objective="mine/score", metrics=metrics)
    head, first, *_ = show(four)[1]
    assert head.split()[-5:-3] == ["mine/score", "val/loss"] and first.split()[0] == "zz"


def test_a_damaged_folder_is_a_line_and_the_others_are_shown(four, show):
    write(four / "a" / "result.json", "{")
    write(four / "sweep" / "1" / ".hydra/overrides.yaml", "!!python/object/apply:os.system [id]")
    os.mkfifo(four / "sweep" / "10" / "result.json")
    write(four / "sweep" / "0" / "status.json", "[1]")
    aliases = ["&a0 [x, x]", *(f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60))]  # 2^60 x
    write(four / "b" / ".hydra/overrides.yaml", f"[{', '.join(aliases)}]")
    code, lines, err = show(four)
    assert code == 0 and [line.split()[0] for line in lines[1:]] == ["0"]
    assert len(err) == 4 and all(line.startswith(f"warning: {four}/") for line in err)
    fifo = four / "sweep" / "10"
    assert f"warning: {fifo}: {fifo}/result.json: not a regular file" in err


def test_a_resumed_run_shows_its_newest_checkpoint(train, show):
    run = train()
    (run.folder / "status.json").unlink()
    with (run.folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = read_run(run.folder)
        assert running.ended == "running" and "seconds" not in running.times  # of another start
    cut = read_run(run.folder)
    assert cut.ended == "steps done" and cut.times["steps"] == 4  # result.json is there
    (run.folder / "result.json").unlink()
    lost = read_run(run.folder)
    assert (lost.ended, lost.times["steps"]) == ("lost", 4) and lost.metrics["val/loss"] > 0
    newest = read_manifest(run.folder / "checkpoints" / "step-00000004")
    assert newest.metrics["step"] == 4 and "step" not in lost.metrics  # Lightning adds it
