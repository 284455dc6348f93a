"""The config of a run folder is used if this user has signed it, else only with trust=true."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest

import gptrain
from tests.run import Run
from tests.run import train as cached_train

RUN = ("model=gpt_nano", "model.n_layers=1", "model.d_model=16", "trainer.max_steps=1")


@pytest.fixture
def run(tmp_path) -> Run:
    """Return a copy of a run that is made once."""
    done = cached_train(*RUN, "trainer.accelerator=cpu", "logger=none", "callbacks=none")
    assert done.code == 0, done.err
    folder = shutil.copytree(done.folder, tmp_path / "copy")
    return replace(done, folder=folder)


def test_a_run_is_loaded_by_its_user_also_after_it_was_moved(run, tmp_path):
    moved = shutil.copytree(run.folder, tmp_path / "moved")
    assert gptrain.load(moved).d_model == 16


@pytest.mark.parametrize("name", ["overrides.yaml", "signature"])
def test_a_folder_that_was_changed_or_is_not_signed_needs_trust(run, train, tmp_path, name):
    moved = shutil.copytree(run.folder, tmp_path / "moved")
    file = moved / ".hydra" / name
    file.write_bytes(b"0" * 64 if name == "signature" else file.read_bytes() + b"\n# mine\n")
    words = (f"from_run={moved}", "task=test")
    refused = train(*words, name="refused", tiny=False)
    assert refused.code == 2 and "trust=true" in refused.err
    assert not refused.folder.exists()
    with pytest.raises(gptrain.ConfigError, match="trust=true"):
        gptrain.load(moved)
    assert gptrain.load(moved, trust=True).d_model == 16


def test_a_key_that_others_can_read_signs_nothing(run, train, tmp_path, monkeypatch):
    # A copy, because the tests of other processes sign with the key at the same time.
    folder = shutil.copytree(
        os.environ["XDG_CONFIG_HOME"] + "/gptrain", tmp_path / "own" / "gptrain"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    assert gptrain.load(run.folder).d_model == 16
    key = folder / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    refused = train(f"from_run={run.folder}", "task=test", name="refused", tiny=False)
    assert refused.code == 2


def test_a_record_that_is_a_pipe_is_not_waited_for(run, train):
    file = run.folder / ".hydra" / "config.yaml"
    file.unlink()
    os.mkfifo(file)
    assert train(f"from_run={run.folder}", "task=test", name="refused", tiny=False).code == 2
