"""`python -m gptrain.runs`, on folders as runs, crashes and strangers leave them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gptrain.runs import __main__ as command
from gptrain.runs.folder import read_run
from gptrain.runs.page import read_curves
from tests.conftest import ROOT


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_run(folder: Path, *overrides: str, loss: float | None = None, **facts) -> Path:
    """A run's records; without a loss it did not come to its end."""
    write(folder / ".hydra/overrides.yaml", yaml.safe_dump([*overrides]))
    config = {"objective": "val/loss", "checkpoint": {"mode": facts.pop("mode", "min")}}
    lr = next((float(o.split("=")[1]) for o in overrides if o.startswith("optimizer.lr")), 3e-4)
    config |= {"optimizer": {"lr": lr}, "run_dir": str(folder)}
    write(folder / ".hydra/config.yaml", yaml.safe_dump(config))
    status = {"cause": "done", "exit_code": 0} | facts.pop("status", {})
    if status["cause"] != "killed":  # by SIGKILL, before it could say so
        write(folder / "status.json", json.dumps(status))
    if loss is not None:
        result = {"metrics": {"val/loss": loss}, "steps": 10, "seconds": 1.5} | facts
        write(folder / "result.json", json.dumps(result))
    return folder


@pytest.fixture
def show(monkeypatch, capfd):
    """What the command answers: (code, lines, lines on stderr)."""

    def run(*words: object) -> tuple[int, list[str], list[str]]:
        monkeypatch.setattr(sys, "argv", ["runs", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            command.main()
        out, err = capfd.readouterr()
        return left.value.code or 0, out.splitlines(), err.splitlines()

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


def test_the_best_run_is_first_and_what_varied_is_shown(four, show):
    code, lines, err = show(four)
    assert code == 0 and not err
    assert lines[0].split() == ["run", "optimizer.lr", "val/loss", "steps", "seconds", "ended"]
    assert [line.split()[0] for line in lines[1:]] == ["sweep/0", "a", "sweep/1", "sweep/10"]
    assert lines[2].endswith("early stop: val/loss=3.5 not better than 3.4, at step 10")
    assert lines[3].split(maxsplit=3) == ["sweep/1", "9", "7", "nonfinite: the loss is nan"]
    assert lines[4].split() == ["sweep/10", "lost"]
    assert show("--diff", four / "sweep" / "1", four / "a")[1][0].split() == ["sweep/1", "a"]


def test_json_is_a_list_and_its_direction_that_of_the_runs(four, show):
    last = make_run(four / "z", "optimizer.lr=1e-3", "+x=1", loss=3.0, mode="max")
    code, lines, _ = show(four, "--json")
    runs = json.loads("\n".join(lines))
    assert code == 0 and [Path(run["run"]).name for run in runs][:3] == ["a", "z", "0"]
    assert runs[1] == {
        "run": str(last), "overrides": ["optimizer.lr=1e-3", "+x=1"],
        "metrics": {"val/loss": 3.0}, "steps": 10, "seconds": 1.5, "ended": "done",
    }  # fmt: skip


def test_a_job_that_was_refused_last_does_not_say_what_is_best(four, show):
    make_run(four / "a", "optimizer.lr=1e-3", loss=3.5, mode="max")
    last = make_run(four / "z", "seed=x", status={"cause": "refused", "exit_code": 2})
    (last / ".hydra/config.yaml").unlink()
    lines = show(four / "a", four / "sweep", last)[1]
    assert [line.split()[0] for line in lines[1:3]] == ["sweep/0", "a"]
    (four / "sweep/10/.hydra/config.yaml").unlink()
    (four / "sweep/1/.hydra/config.yaml").unlink()
    (four / "sweep/0/.hydra/config.yaml").unlink()
    lines = show(four / "a", four / "sweep", last)[1]
    assert [line.split()[0] for line in lines[1:3]] == ["a", "sweep/0"]


def test_an_export_is_no_run(four, show):
    write(four / "export/.hydra/config.yaml", "model: {}")
    code, lines, err = show(four)
    assert code == 0 and len(lines) == 5 and not err


def test_filters(four, show):
    def names(*words: object) -> list[str]:
        return [line.split()[0] for line in show(*words)[1][1:]]

    assert names(four, "--where", "optimizer.lr=0.001") == ["a"]  # typed as 1e-3
    assert names(four, "--where", "optimizer.lr=3e-4") == ["10"]  # composed
    assert names(four, "--where", "ended=nonfinite", "--where", "model=gpt_nano") == ["1"]
    assert names(four / "a", four, four / "a").count("a") == 1


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--wher", "a=1"], 2, "error: unrecognized arguments: --wher"),
        (["--html", "/dev/null/x"], 73, "error: --html=/dev/null/x: "),
        (["--where", "seed=7"], 66, "error: no run with seed=7 in"),
        (["--where", "seed"], 2, "error: --where=seed: not KEY=VALUE"),
        (["--diff"], 2, "error: --diff: compares two runs, and these are 4"),
        (["nowhere"], 66, "error: no run in nowhere"),
    ],
)
def test_a_wrong_word_is_a_line(words, code, said, four, show):
    found, out, err = show(*([four] if words[0][0] == "-" else []), *words)
    assert found == code and not out and len(err) == 1 and err[0].startswith(said)


def test_a_damaged_folder_is_a_line_and_the_others_are_shown(four, show):
    write(four / "a" / "result.json", "{")
    write(four / "sweep" / "1" / ".hydra/overrides.yaml", "!!python/object/apply:os.system [id]")
    os.mkfifo(four / "sweep" / "10" / "result.json")
    write(four / "sweep" / "0" / "status.json", "[1]")
    code, lines, err = show(four)
    assert code == 0 and [line.split()[0] for line in lines[1:]] == ["0"]
    assert len(err) == 3 and all(line.startswith("warning: ") for line in err)


def test_strange_values_are_no_figures_and_no_control_characters(tmp_path, show):
    metrics = {"val/loss": "low", "x": True, "y": 1e400, "\x1b[31mred": 1}
    run = make_run(tmp_path / "a", "seed=\x1b[2J", loss=1, ended="x", steps="many")
    write(run / "result.json", json.dumps({"metrics": metrics, "steps": [], "ended": [1]}))
    make_run(tmp_path / "b", "seed=1", loss=1.0)
    code, lines, _ = show(tmp_path)
    assert code == 0 and all(line.isprintable() for line in lines)
    assert read_run(run).metrics == {"\x1b[31mred": 1} and read_run(run).steps is None


def test_a_run_that_goes_on_shows_its_newest_checkpoint(train, show):
    run = train("trainer.val_check_interval=2")
    (run.folder / "status.json").unlink()
    with (run.folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run.folder).ended == "running"
    cut = read_run(run.folder)
    assert cut.ended == "steps done" and cut.steps == 4  # result.json is there
    (run.folder / "result.json").unlink()
    lost = read_run(run.folder)
    assert (lost.ended, lost.steps) == ("lost", 4) and lost.metrics["val/loss"] > 0


def test_hundreds_of_runs_take_seconds_and_no_torch(tmp_path):
    for number in range(300):
        make_run(tmp_path / str(number), f"seed={number}", loss=number)
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    words = "import runpy, sys\n"
    words += "try: runpy.run_module('gptrain.runs', run_name='__main__')\n"
    words += "except SystemExit: print({'torch', 'hydra', 'lightning'} & sys.modules.keys())"
    before, run = os.times(), [sys.executable, "-c", words, tmp_path]
    said = subprocess.run(run, capture_output=True, text=True, env=env, check=True).stdout
    after, lines = os.times(), said.splitlines()
    assert len(lines) == 302 and lines[-1] == "set()" and lines[1].split()[0] == "0"
    assert after.children_user - before.children_user < 5


def test_diff_shows_what_differs_and_nothing_else(train, show):
    """Two runs of one code on one machine: an option, and what came of it."""
    one = train("optimizer.lr=1e-3", "logger=csv", name="one")
    other = train("optimizer.lr=2e-3", "logger=csv", name="other")
    code, lines, _ = show("--diff", one.folder, other.folder)
    assert code == 0 and lines[0].split() == ["one", "other"]
    keys = {line.split()[0] for line in lines[1:]}
    assert "optimizer.lr" in keys and "metrics.train/loss" in keys
    assert not [key for key in keys if not key.startswith(("optimizer.lr", "metrics.", "seconds"))]
    result = json.loads((other.folder / "result.json").read_text())
    result["versions"]["torch"], result["git"] = "1.0", {"commit": "abc", "dirty": True}
    write(other.folder / "result.json", json.dumps(result))
    told = {
        line.split()[0]: line.split()[1:] for line in show("--diff", one.folder, other.folder)[1]
    }
    assert told["versions.torch"][1] == "1.0" and "git.commit" in told


def test_a_page_holds_no_value_that_json_does_not_know(four, show):
    """Of a run whose loss was not finite, of one that a stranger made, of files that are none."""
    write(four / "a/metrics.csv", "step,train/loss\n1,3.0\n2,nan\n3,inf\n4,2.0\n")
    write(four / "sweep/0/.hydra/config.yaml", "{objective: val/loss, x: .nan, y: [1, .inf]}")
    write(four / "sweep/0/.restarts", '{"starts": [{"step": NaN}, 5, {"step": 3, "after": "x"}]}')
    write(four / "sweep/0/metrics.csv", "step,train/loss\n1,low\n")
    write(four / "sweep/1/metrics.csv", "step\n1,2,3\n")
    os.mkfifo(four / "sweep/10/metrics.csv")
    code, _, err = show(four, "--html", four / "runs.html")
    assert code == 0 and len(err) == 3 and all("no curves: " in line for line in err)
    text = (four / "runs.html").read_text().partition('type="application/json">')[2]
    page = json.loads(text.partition("</script>")[0], parse_constant=pytest.fail)
    runs = {run["name"]: run for run in page["runs"]}
    assert runs["a"]["curves"] == {"train/loss": [[1, 3], [4, 2]]}
    assert runs["sweep/0"]["config"]["y"] == [1, None]
    assert runs["sweep/0"]["starts"] == [{"step": None}, 5, {"step": 3, "after": "x"}]


def test_the_page_has_every_run_curve_and_restart(train, show, tmp_path):
    (tmp_path / "outputs").mkdir()
    train("optimizer.lr=1e-3", "logger=csv", "scheduler=constant", name="outputs/a")
    for steps, words in ((2, ()), (4, ("ckpt_path=last",))):
        limit = (f"trainer.max_steps={steps}", "scheduler=constant")
        assert train(*words, *limit, name="outputs/b").code == 0
    stop = make_run(tmp_path / "outputs" / "c", "seed=</script><b>", loss=9.0)
    write(stop / "metrics.csv", "step,train/loss\n1,3.0\n2,2.0\n3,\n")
    events = read_curves(tmp_path / "outputs/b")
    assert [step for step, _ in events["train/loss"]] == [1, 2, 3, 4] or events["train/loss"][-1][
        0
    ] == 4
    assert read_curves(stop) == {"train/loss": [(1, 3), (2, 2)]}
    code, lines, _ = show(tmp_path / "outputs", "--html", tmp_path / "runs.html")
    assert code == 0 and lines[-1].endswith("3 runs")
    page = (tmp_path / "runs.html").read_text()
    assert "</script><b>" not in page and page.count("<script") == 2
    assert not [
        word
        for word in ("http://", "https://", "src=", "@import", "url(")
        if word in page.replace("http://www.w3.org/2000/svg", "")
    ]
    browser = pytest.importorskip("tests.browser")
    with browser.browser() as window:
        window.open((tmp_path / "runs.html").as_uri())
        text = window.wait_for("3 runs, 3 done", "train/loss", "Endings and restarts")
        assert "from step 2, after: done" in text and "</script><b>" in text
        rows = "[...document.querySelectorAll('#table tbody tr td:first-child')]"
        order = f"return {rows}.map(cell => cell.innerText)"
        first = window.run(order)
        assert len(first) == 3 and first[-1] == "c"  # its loss is the worst
        window.click("th", "val/loss")
        window.click("th", "val/loss")
        assert window.run(order)[0] == "c"
        assert window.run("return document.querySelectorAll('path.curve').length") >= 8
        window.click("tbody tr", "c")
        assert window.run("return document.querySelectorAll('.faded').length") >= 8
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")
