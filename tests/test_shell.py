"""Which project a command works for, and that printed commands can be pasted."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from gptrain.config.cli import run_command
from gptrain.core import locations, shell
from tests.command_line import compose_command
from tests.conftest import ROOT
from tests.run import train as run_train

ODD = [
    "lr=1e-3", "run #2", "été", "model (v2)", "a,b", "it's", 'say "x"', "$HOME and `id`", "[1] {2}",
    "-x", "~x", "!!", "back\\slash'", "a;b&c|d", "*?", "null", "0x1", "新加卷", "100%", "${a}",
]  # fmt: skip


def read_by_a_shell(line: str) -> list[str]:
    """Return the words that bash makes of a pasted line, without running the program."""
    words = ["bash", "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def value_of(word: str) -> object:
    """Return the value of an override, as Hydra's parser and OmegaConf read it."""
    value = OverridesParser.create().parse_override(word).value()
    return OmegaConf.create({"key": value}).key


@pytest.mark.parametrize("name", ODD)
def test_a_shell_and_hydra_read_any_text_as_it_is(name):
    for text in (name, f"out/{name}", f"/tmp/{name}/x"):
        line = shell.command("python", "train.py", shell.override("key", text))
        words = read_by_a_shell(line)
        assert words[:2] == ["python", "train.py"] and len(words) == 3
        assert value_of(words[2]) == text
        assert shlex.split(line) == words


def test_other_values_keep_their_types():
    for value in (3, 1e-4, True, None, [1, 2]):
        assert value_of(shell.override("key", value)) == value


def test_a_home_folder_is_expanded_once_and_a_name_with_a_tilde_stays_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert locations.expand_home("~/runs") == Path("/home/me/runs")
    for typed in ("./~", "./~x", "~nobody-of-this-name/x"):
        folder = locations.expand_home(typed)
        assert locations.expand_home(folder) == folder == tmp_path / typed


def test_the_lines_at_the_end_of_a_run_and_in_its_status_run_as_they_are_pasted(train, tmp_path):
    name = "it's $HOME ~[x], lr=1e-3 (é)"
    reference = "optimizer.weight_decay=${.lr}"  # kept as it was typed
    run = train("logger=none", "callbacks=none", "trainer.max_steps=1", reference, name=name)
    assert run.code == 0, run.err
    (line,) = [line for line in run.out.splitlines() if line.startswith("next ")]
    test, board = line.removeprefix("next").split("; ")
    assert read_by_a_shell(board) == ["tensorboard", f"--logdir={tmp_path / name}"]
    python, script, *pasted = read_by_a_shell(test)
    assert (python, script) == ("python", str(ROOT / "train.py"))
    tested = run_train(*pasted, cached=False)
    assert tested.code == 0 and "test/loss" in tested.metrics, tested.err
    resume = read_by_a_shell(run.status["resume"])[2:]
    assert reference in resume
    more = run_train(*resume, "trainer.max_steps=2")
    assert more.code == 0 and "from step 1 to 2" in more.out, more.err


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with one choice of its own, and no GPTRAIN_CONF."""
    monkeypatch.delenv(locations.VARIABLE)
    monkeypatch.delenv("GPTRAIN_OUTPUT_DIR")
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "mine"
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "src").mkdir()
    (folder / "train.py").touch()
    (folder / "conf" / "train.yaml").write_text(
        (locations.LIBRARY / "conf" / "train.yaml").read_text().replace("simple_gpt", "tiny")
    )
    (folder / "conf" / "model" / "tiny.yaml").write_text("defaults: [gpt_nano]\nd_model: 8\n")
    return folder


def test_the_nearest_project_above_is_meant(project, monkeypatch, capsys):
    (project / "a" / "conf").mkdir(parents=True)  # a conf/ alone is no project
    monkeypatch.chdir(project / "a")
    cfg = compose_command([])
    assert cfg.model.d_model == 8 and cfg.output_dir == str(project / "outputs")
    assert run_command(lambda cfg: None, ["--help"]) == 0
    assert {"tiny", "gpt_nano", "quickstart"} & set(capsys.readouterr().out.split()) == {
        "tiny", "gpt_nano",
    }  # fmt: skip


def test_a_name_goes_before_the_working_directory_and_train_py_before_both(
    project, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(locations.VARIABLE, "mine/conf")
    assert compose_command([]).model.d_model == 8
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "other" / "conf"))
    locations.enter("mine/conf")
    monkeypatch.chdir("/")  # a rank or a job of a sweep may run in another folder
    assert locations.find_project() == project
    locations.enter()
    assert sys.path[-1] == str(project / "src") and sys.path.count(sys.path[-1]) == 1


def test_outside_of_any_project_there_are_the_librarys_own_choices(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locations.find_project() is None
    cfg = compose_command(["model=gpt_nano"])
    assert cfg.model.d_model == 128 and cfg.output_dir == str(tmp_path / "outputs")


def test_a_name_of_no_folder_is_a_line(project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "gone"))
    assert run_command(lambda cfg: None, []) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and f"{tmp_path}/gone" in line
