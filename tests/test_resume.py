"""Whether a run may go on: what must not change, what may, and what counts as getting on.

That a resumed run is equal bit for bit is shown by the campaign of faults, see test_faults.py.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain.assemble.resume import (
    changed_options,
    check_data,
    differences,
    find_checkpoint,
    find_trained,
    identity,
    keep_warmup,
)
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.rng import capture
from gptrain.checkpoints.store import CheckpointStore
from gptrain.config.cli import compose_command
from gptrain.config.compose import plain, typed
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.core.schema import RunConfig
from gptrain.lit.callbacks import resume
from gptrain.runtime import rank as rank_module
from tests.command_line import compose_run

RUN = "a" * 32
LOCK = SimpleNamespace(run_id=RUN)


@cache
def composed() -> DictConfig:
    return compose_command(["model=gpt_nano", "trainer=cpu"])


@pytest.fixture
def compose(tmp_path):
    """Make typed configs of a small run in a new folder."""

    def compose(*values: str) -> RunConfig:
        cfg = copy.deepcopy(composed())
        cfg.merge_with_dotlist([f"run_dir={tmp_path}/run", *values])
        return typed(plain(cfg), RunConfig)

    return compose


def save(cfg, step: int, batch: int = 32, metrics=None, **facts) -> CheckpointStore:
    Path(cfg.run_dir).mkdir(exist_ok=True)
    store = CheckpointStore(f"{cfg.run_dir}/checkpoints", RUN)
    about = {"config": identity(cfg, batch) | facts, "metrics": metrics}
    store.save(step, {}, {}, **about)
    return store


def refused(cfg, world_size: int = 1) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        find_checkpoint(cfg, LOCK, world_size)
    return error.value


CHANGES = "seed=1 optimizer.betas=[0.9,0.99] scheduler.min_factor=0 trainer.precision=bf16-mixed"
CHANGES += " trainer.gradient_clip_val=0.5 data.num_samples=99 data.seq_len=64 data.batch_size=16"
CHANGES += " model.vocab_size=128"
INDIFFERENT = "data.num_workers=3 trainer.max_steps=99 model.compile=blocks trainer.devices=2"


@pytest.mark.parametrize("changed", CHANGES.split())
def test_another_run_is_refused_in_one_line_that_names_the_key(compose, changed):
    save(compose(), 5)
    problem = refused(compose(changed, "ckpt_path=last"))
    key = changed.partition("=")[0].replace("data.batch_size", "data.global_batch_size")
    assert problem.code == 2
    assert [issue.key for issue in problem.problems] == [key]
    assert problem.lines[0].endswith(f"; try: that value, or 'allow_changes=[{key}]'")
    assert find_checkpoint(compose(changed, "ckpt_path=last", f"allow_changes=[{key}]"), LOCK, 1)


@pytest.mark.parametrize("path", ["last", "step-00000005", "step-00000005/state.ckpt"])
def test_options_that_do_not_affect_the_result_may_change(compose, path):
    """A checkpoint is named by its folder, too, or by a file of it."""
    store = save(compose("trainer.precision=32-true"), 5)
    path = path if path == "last" else store.folder / path
    cfg = compose(*INDIFFERENT.split(), "trainer.precision=32", f"ckpt_path={path}")
    assert find_checkpoint(cfg, LOCK, 1).name == "step-00000005"


def test_the_global_batch_counts_and_not_how_it_is_divided(compose):
    cfg = compose("ckpt_path=last", "data.batch_size=16", "data.global_batch_size=32")
    save(compose(), 5)
    assert find_checkpoint(cfg, LOCK, world_size=2)
    assert refused(compose("ckpt_path=last"), world_size=2).problems[0].value == 64
    # Two ranks of a tensor group read the same samples.
    words = ("model=gpt_nano", "trainer=cpu", "strategy=tensor_parallel", "trainer.devices=2")
    split = compose_run(*words, f"run_dir={cfg.run_dir}", "ckpt_path=last")
    assert find_checkpoint(split, LOCK, world_size=2)
    # The ranks of a node share a sequence, here of two heads.
    words = ("model=gpt_nano", "trainer=cpu", "model.n_heads=2", "strategy=context_parallel",
             "data.batch_size=16", "trainer.devices=2", "trainer.num_nodes=2")  # fmt: skip
    here = (f"run_dir={cfg.run_dir}", "ckpt_path=last", "allow_changes=[model]")
    assert find_checkpoint(compose_run(*words, *here), LOCK, world_size=4)
    # A run by tokens is measured in steps of one size.
    words = ("ckpt_path=last", "max_tokens=1e6", "data.batch_size=16")
    problem = refused(compose(*words, "allow_changes=[data.global_batch_size]"))
    assert (problem.code, problem.problems[0].key) == (2, "max_tokens")
    assert problem.lines[0].endswith("; try: trainer.max_steps=<n> max_tokens=null")
    evaluation = compose(*words[1:], "task=test", f"ckpt_path={cfg.run_dir}", "run_dir=/other")
    assert find_checkpoint(evaluation, LOCK, 1)


def test_on_another_number_of_ranks_each_of_a_tensor_group_draws_its_own_numbers(monkeypatch):
    """Ranks of a tensor group read the same samples, and each drops other activations."""
    for name in ("clear_restarting_flags", "restore_logged", "finish_step"):
        monkeypatch.setattr(resume, name, lambda *_: None)
    for name in ("apply_changes", "follow_schedule"):
        monkeypatch.setattr(resume, name, lambda *_: [])
    drawn = set()
    state = {"rng": [capture()], "global_step": 1, "frozen": []}
    for rank in (0, 1):
        trainer = SimpleNamespace(
            world_size=2, global_rank=rank, is_global_zero=False,
            strategy=SimpleNamespace(root_device=torch.device("cpu"), saved_parameters=dict),
            datamodule=SimpleNamespace(rank=0),
        )  # fmt: skip
        resume.resume_run(trainer, state, frozenset())
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 2


def test_other_content_of_the_data_is_refused(compose):
    cfg = compose("ckpt_path=last")
    checkpoint = save(cfg, 5, data="0123").folder / "step-00000005"
    check_data(cfg, checkpoint, "0123")
    with pytest.raises(ConfigError, match="data=4567: the checkpoint was made with 0123"):
        check_data(cfg, checkpoint, "4567")
    # An evaluation may read other data, and so may a training that is allowed to.
    for words in (("task=test", "ckpt_path=last"), ("ckpt_path=last", "allow_changes=[data]")):
        check_data(compose(*words), checkpoint, "4567")


def test_an_evaluation_needs_the_same_net_only_and_text_may_be_cached_elsewhere(compose):
    saved = identity(compose(), 32)
    assert not differences(compose("task=test", "seed=7", "optimizer.lr=1"), saved, 8)
    assert differences(compose("task=test", "model.n_layers=1"), saved, 8)
    words = ("model=gpt_nano", "trainer=cpu", "data=text", "data.path=x")
    here = compose_run(*words, "data.train.cache_dir=/a")
    there = compose_run(*words, "data.train.cache_dir=/b")
    assert not differences(there, identity(here, 32), 32)


def test_options_of_a_strategy_do_not_change_what_is_computed():
    words = ("model=gpt_nano", "trainer=cpu", "strategy=fsdp", "trainer.devices=2")
    saved = identity(compose_run(*words), 32)
    assert not differences(compose_run(*words, "strategy.replicas=2"), saved, 32)


def test_a_checkpoint_from_before_a_key_existed_resumes_unless_the_key_is_set(monkeypatch):
    """A newer library has more keys. Their defaults do what the older library did."""
    cfg = compose_run("model=gpt_nano", "trainer=cpu")
    saved = identity(cfg, 32)
    younger = "scheduler.min_factor"
    del saved[younger]
    assert differences(cfg, saved, 32) == []
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    for word in (f"{younger}={cfg.value_of(younger)}", "scheduler=warmup_cosine"):
        hydra = OmegaConf.create({"overrides": {"task": [word]}})
        monkeypatch.setattr(HydraConfig, "get", lambda hydra=hydra: hydra)
        assert [problem.key for problem in differences(cfg, saved, 32)] == [younger]


def test_a_group_in_allow_changes_stands_for_all_its_options():
    """The learning rates of Muon's groups are all called `lr` in a parameter group."""
    words = ("model=gpt_nano", "optimizer=muon", "optimizer.head_lr=0.1")
    changed = changed_options(compose_run(*words, "allow_changes=[optimizer]"))
    assert {"lr", "betas", "momentum"} <= {*changed} and not {"head_lr", "vector_lr"} & {*changed}
    assert changed_options(compose_run(*words, "allow_changes=[optimizer.head_lr,seed]")) == ("lr",)


def test_a_resume_removes_what_killed_saves_left_and_brings_a_replaced_checkpoint_back(compose):
    store = save(compose(), 5)
    save(compose(), 6)
    for name in (".draft-step-00000007", ".trash-step-00000002"):
        (store.folder / name).mkdir()
        (store.folder / name / "state.ckpt").write_bytes(b"half")
    (store.folder / "step-00000006").rename(store.folder / ".old-step-00000006")
    assert find_checkpoint(compose("ckpt_path=last"), LOCK, 1).name == "step-00000006"
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["step-00000005", "step-00000006"]


def test_a_derived_warm_up_stays_that_of_the_first_start_unless_another_is_asked_for(compose):
    """The first start had a warm-up of 3 steps, a tenth of its 30 steps."""
    lengths = RunLengths(BatchPlan(32, 1, 1), 16, 99, n_steps=60, validate_every=60)
    saved = {"warmup_steps": 3, "scheduler.warmup_steps": None, "scheduler.warmup_tokens": None}
    for words, warmup in (((), 3), (("scheduler.warmup_steps=5",), None)):
        assert keep_warmup(compose(*words), lengths, saved).warmup_steps == warmup
    in_tokens = compose("scheduler.warmup_tokens=5120")
    assert keep_warmup(in_tokens, lengths, saved).warmup_steps is None
    assert keep_warmup(compose(), lengths, {}).warmup_steps is None  # an older library's run


def test_last_in_a_fresh_folder_starts_from_the_beginning_and_says_so(compose, caplog):
    caplog.set_level("INFO")
    assert find_checkpoint(compose("ckpt_path=last"), LOCK, 1) is None
    assert "from the beginning" in caplog.text


def test_a_fresh_run_does_not_mix_with_one_that_was_saved(compose, tmp_path):
    save(compose(), 5)
    problem, about = refused(compose()), f"error: run_dir={compose().run_dir}: "
    assert problem.code == 73 and str(problem).startswith(f"{about}holds a run that was saved at ")
    assert "; try: ckpt_path=last to resume it, or another run_dir" in str(problem)
    problem = refused(compose("task=test"))
    assert problem.code == 73
    assert str(problem).startswith(f"{about}holds a trained run; try: from_run=")
    # fast_dev_run saves nothing, so that neither the folder nor the mirror of a run matters.
    another, mirror = CheckpointStore(tmp_path / "another", "b" * 32), Mirror(f"{tmp_path}/mirror")
    another.save(1, {}, b"state")
    mirror.update(another)
    mirror.wait()
    mirrored = f"checkpoint.mirror={tmp_path}/mirror"
    assert find_checkpoint(compose("trainer.fast_dev_run=true", mirrored), LOCK, 1) is None
    hint = "holds another run; try: ckpt_path=last in a new run_dir to resume that run"
    assert str(refused(compose("ckpt_path=last", mirrored))) == f"error: {mirrored}: {hint}"


def test_a_file_of_weights_begins_another_run(compose, tmp_path):
    torch.save({}, tmp_path / "x.ckpt")
    message = "a file of weights, from which no run can be resumed exactly; try: init_from"
    problem = refused(compose(f"ckpt_path={tmp_path}/x.ckpt"))
    assert str(problem) == f"error: ckpt_path={tmp_path}/x.ckpt: {message}={tmp_path}/x.ckpt"
    assert problem.code == 65


def test_a_checkpoint_of_another_run_in_the_folder_is_not_taken(compose):
    save(compose(), 5)
    with pytest.raises(ConfigError, match="step-00000005: belongs to another run"):
        find_checkpoint(compose("ckpt_path=last"), SimpleNamespace(run_id="b" * 32), 1)


@pytest.mark.parametrize("mode, step", [("min", 5), ("max", 6)])
def test_the_best_checkpoint_is_chosen_by_the_monitor_and_its_mode(compose, mode, step):
    for saved, value in ((5, 1.0), (6, 3.0), (7, 2.0)):
        save(compose(), saved, metrics={"mine": value, "val/loss": value})
    cfg = compose("ckpt_path=best", "checkpoint.monitor=mine", f"checkpoint.mode={mode}")
    assert find_checkpoint(cfg, LOCK, 1).name == f"step-{step:08d}"
    # A path of a run means its newest checkpoint.
    cfg = compose(f"ckpt_path={cfg.run_dir}", f"checkpoint.mode={mode}")
    assert find_checkpoint(cfg, LOCK, 1).name == "step-00000007"
    # An evaluation and an export choose by the same monitor.
    words = ("task=test", f"from_run={cfg.run_dir}", "checkpoint.monitor=mine")
    for which, best in (("null", step), ("best", step), ("last", 7)):
        cfg = compose(*words, f"checkpoint.mode={mode}", f"ckpt_path={which}")
        assert find_trained(cfg).step == best


def test_a_key_of_a_dataset_that_repeats_another_key_is_compared_once(compose):
    facts = identity(compose(), 32)
    assert {key for key in facts if key.startswith("data.")} == {
        "data.global_batch_size", "data.num_samples", "data.seq_len", "data.train._target_",
        "data.val._target_", "data.val.num_samples",
    }  # fmt: skip
    # An empty group is a value, so that metrics cannot come or go on a resume. No clipping is 0.
    assert facts["module.metrics"] == {}
    off = [identity(compose(f"trainer.gradient_clip_val={value}"), 32) for value in (0, "null")]
    assert off[0] == off[1] and facts["trainer.gradient_clip_val"] == 1.0
    # Neither recomputed activations nor rounding up a vocabulary of the same size changes a result.
    words = ("model.vocab_multiple=64", "model.activation_checkpointing=full")
    assert identity(compose(*words), 32) == facts


def test_damage_and_absence_have_codes_of_their_own(compose):
    store = save(compose(), 5)
    assert refused(compose(f"ckpt_path={store.folder}/step-00000006")).code == 66
    assert refused(compose("ckpt_path=best")).code == 66
    (store.folder / "step-00000005" / "state.ckpt").write_bytes(b"stale")
    assert refused(compose("ckpt_path=last")).code == 65
    with pytest.raises(ConfigError, match="from_run=/nowhere: no such file or folder") as missing:
        find_trained(compose("task=test", "from_run=/nowhere"))
    assert missing.value.code == 66


@pytest.mark.parametrize("task, found", [("fit", "last"), ("test", "best")])
def test_a_training_that_is_restarted_loads_its_newest_checkpoint_and_an_evaluation_the_typed_one(
    task, found, compose, tmp_path, monkeypatch
):
    save(compose(f"run_dir={tmp_path}"), 5)
    cfg = compose(f"run_dir={tmp_path}", f"task={task}", "ckpt_path=best")
    looked = []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(rank_module, "keep_config", lambda cfg: None)
    rank_module.prepare_start(cfg, lambda cfg, *_: looked.append(cfg.ckpt_path), LOCK, world_size=1)
    assert looked == [found]
