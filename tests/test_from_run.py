"""An old run by its folder: its overrides under today's schema, then those typed now."""

from __future__ import annotations

import hashlib

import pytest
import yaml
from omegaconf import OmegaConf

from gptrain.checkpoints.signature import sign_record
from gptrain.checkpoints.store import read_manifest
from gptrain.config import compose_command
from gptrain.config.from_run import expand
from gptrain.core.errors import ConfigError
from gptrain.core.labels import line


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


def hashes(folder) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


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


def test_evaluating_the_best_checkpoint_gives_the_same_value_in_a_new_folder(train):
    run = train(
        "trainer.val_check_interval=2", "optimizer.lr=0.3", "scheduler.warmup_steps=3",
        "scheduler.start_factor=0.0001", "trainer.limit_test_batches=2", "logger=csv",
    )  # fmt: skip
    assert run.code == 0, run.err
    before = hashes(run.folder)
    manifest = read_manifest(run.folder / "checkpoints" / "step-00000002")
    worse = {"validate": "ckpt_path=last", "test": "checkpoint.mode=max"}
    for task, metric in (("validate", "val/loss"), ("test", "test/loss")):
        words = (f"task={task}", f"from_run='{run.folder}'")
        again = train(*words, tiny=False, name=f"{task} = again")
        assert again.code == 0, again.err
        assert again.out.startswith(line(task, f"from step 2: {run.folder}/checkpoints/"))
        assert again.metrics[metric] == manifest["metrics"]["val/loss"] < run.metrics["val/loss"]
        last = train(*words, worse[task], tiny=False, name=f"{task} last")
        assert last.metrics[metric] == run.metrics["val/loss"]
    assert hashes(run.folder) == before


def test_a_run_resumes_without_repeating_its_options(train):
    options = ("scheduler=constant", "trainer.log_every_n_steps=1")
    run = train(*options, "trainer.val_check_interval=2")
    whole = run.losses()
    run.cut_back(2)
    again = train(f"from_run='{run.folder}'", "ckpt_path=last", tiny=False)
    assert again.code == 0, again.err
    assert again.losses() == whole and len(whole) == 4


def test_terminal_control_characters_are_shown_escaped(train, old_run):
    escapes = "x\x1b]0;PWNED\x07\x1b[31m"
    run = train(old_run(f"name='{escapes}'", "model.max_seq_len=16"))
    assert run.code == 0, run.err
    log = (run.folder / "train.log").read_text()
    assert "\x1b" not in run.out + run.err + log and "\x07" not in run.out + run.err + log
    again = train(
        old_run("data=text", f"data.path='{escapes}'", name="lost"), name="again", tiny=False
    )
    assert again.code == 66 and "\x1b" not in again.err and r"\x1b" in again.err
