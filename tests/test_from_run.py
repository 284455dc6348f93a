"""An old run by its folder: its overrides come first, if this user has signed it or trusts it."""

from __future__ import annotations

import os
import shutil

import pytest
import yaml
from omegaconf import OmegaConf

import gptrain
from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.signature import sign_record
from gptrain.config.from_run import expand
from gptrain.core.errors import ConfigError
from gptrain.core.labels import line
from tests.command_line import compose_command
from tests.run import same


@pytest.fixture
def old_run(tmp_path):
    """Makes a run folder that says it was started with these overrides."""

    def make(*overrides: str, name: str = "old") -> str:
        folder = tmp_path / name / ".hydra"
        folder.mkdir(parents=True)
        (folder / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
        sign_record(tmp_path / name)
        return f"from_run='{tmp_path / name}'"

    return make


def test_new_overrides_come_after_the_old_runs_overrides(old_run):
    old = old_run("model=gpt_nano", "optimizer.lr=0.5", "seed=7", "+trainer.min_epochs=2")
    cfg = compose_command([old, "optimizer.lr=0.25", "model=gpt2"])
    assert (cfg.optimizer.lr, cfg.seed, cfg.model.d_model) == (0.25, 7, 768)
    assert cfg.trainer.min_epochs == 2


def test_the_old_runs_folder_and_checkpoint_path_are_not_reused(old_run, tmp_path):
    first = old_run("run_dir=/elsewhere", "ckpt_path=last", "allow_changes=[seed]", "seed=3",
                    "output_dir=/elsewhere", "logger=csv", "profiler=simple", "hydra.verbose=true",
                    "trust=true")  # fmt: skip
    assert expand([first]) == ["seed=3", first]
    cfg = compose_command([first])
    assert cfg.seed == 3 and cfg.ckpt_path is None and list(cfg.allow_changes) == []
    assert OmegaConf.to_container(cfg)["run_dir"] != "/elsewhere"
    second = old_run("seed=3", first, "optimizer.lr=0.5", name="second")
    cfg = compose_command([second])
    assert (cfg.seed, cfg.optimizer.lr) == (3, 0.5)
    assert cfg.from_run == str(tmp_path / "second")


@pytest.mark.parametrize("word", ["strategy.shards=2", "trainer.tpu_cores=8", "model=gpt5"])
def test_a_key_that_no_longer_exists_is_named_and_can_be_left_out(old_run, word):
    old = old_run("seed=3", "model=gpt2", word)
    with pytest.raises(ConfigError, match=word) as caught:
        compose_command([old])
    assert caught.value.code == 2
    key = word.partition("=")[0]
    cfg = compose_command([old, "model=gpt2" if key == "model" else f"~{key}"])
    assert (cfg.seed, cfg.model.d_model) == (3, 768)


def test_the_best_and_the_last_checkpoint_are_evaluated_in_a_new_folder(saved_twice, train):
    run, two_batches = saved_twice, "trainer.limit_test_batches=2"
    files = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    best = read_manifest(run.folder / "checkpoints" / "step-00000002").metrics["val/loss"]
    words = ("validate", "val/loss", best), ("test", "test/loss", run.metrics["val/loss"])
    for (task, metric, loss), which in zip(words, ("best", "last"), strict=True):
        again = train(f"task={task}", f"from_run='{run.folder}'", f"ckpt_path={which}", two_batches,
                      tiny=False, name=f"{task} = again")  # fmt: skip
        assert again.code == 0, again.err
        assert again.out.startswith(line(task, f"from step {2 if which == 'best' else 4}: "))
        assert again.metrics[metric] == loss
    assert best < loss
    assert files == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def test_a_run_resumes_without_repeating_its_options(saved_twice, train):
    weights = saved_twice.state(4)["weights"]
    saved_twice.cut_back(2)
    again = train(f"from_run='{saved_twice.folder}'", "ckpt_path=last", tiny=False)
    assert again.code == 0 and "from step 2" in again.out, again.err
    assert not same(again.state(4)["weights"], weights)


@pytest.mark.parametrize("name", ["overrides.yaml", "signature"])
def test_a_folder_that_was_changed_or_is_not_signed_needs_trust(saved_twice, train, tmp_path, name):
    moved = shutil.copytree(saved_twice.folder, tmp_path / "moved")
    file = moved / ".hydra" / name
    file.write_bytes(b"0" * 64 if name == "signature" else file.read_bytes() + b"\n# mine\n")
    words = (f"from_run={moved}", "task=test")
    refused = train(*words, name="refused", tiny=False)
    assert refused.code == 2 and "trust=true" in refused.err
    assert not refused.folder.exists()
    with pytest.raises(gptrain.ConfigError, match="trust=true"):
        gptrain.load(moved)
    assert gptrain.load(moved, trust=True).d_model == 32


def test_a_key_that_others_can_read_signs_nothing(saved_twice, train, tmp_path, monkeypatch):
    # A copy, because the tests of other processes sign with the key at the same time.
    folder = shutil.copytree(
        os.environ["XDG_CONFIG_HOME"] + "/gptrain", tmp_path / "own" / "gptrain"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder.parent))
    assert gptrain.load(saved_twice.folder).d_model == 32
    key = folder / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)
    refused = train(f"from_run={saved_twice.folder}", "task=test", name="refused", tiny=False)
    assert refused.code == 2


def test_a_record_that_is_a_pipe_is_not_waited_for(saved_twice, train):
    file = saved_twice.folder / ".hydra" / "config.yaml"
    file.unlink()
    os.mkfifo(file)
    words = (f"from_run={saved_twice.folder}", "task=test")
    assert train(*words, name="refused", tiny=False).code == 2
