"""Which project a command works for, from the folder where it is typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gptrain.config import compose_command
from gptrain.config.cli import run_command
from gptrain.core import locations


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
    assert line.startswith(f"error: GPTRAIN_CONF={tmp_path}/gone: no such folder")
