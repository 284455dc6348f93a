"""A failure costs no training: a step is saved before its validation, or after the failure."""

from __future__ import annotations

import json
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from gptrain.checkpoints.amendment import NAME
from gptrain.checkpoints.manifest import read_manifest
from gptrain.checkpoints.status import PreemptedError
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.timeline import Timeline
from gptrain.checkpoints.writer import CheckpointWriter
from gptrain.lit.callbacks import checkpoints
from gptrain.lit.callbacks.monitor import TrainingMonitor
from gptrain.lit.callbacks.salvage import allow_amendment
from gptrain.lit.datamodule import Loader
from gptrain.lit.strategies.base import OneDevice
from gptrain.parallel.base import Parallel
from tests.lit.conftest import OWN, differences, same_rows

CALLBACKS = f"{OWN}.callbacks"
BREAKS = f"+module.metrics.broken={{_target_: {OWN}.metrics.Breaks, at: %d}}"
EARLY = (
    "+callbacks.early={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss,"
    " patience: 9}"
)
NODES = f"+callbacks.nodes._target_={CALLBACKS}.OneRankPerNode"
TWO = ("trainer.devices=2", "data.batch_size=2", NODES)
WORDS = (
    "trainer.val_check_interval=2", "model.dropout=0.1", "checkpoint.keep=9", "data.num_samples=16",
    "trainer.max_epochs=9", EARLY,
)  # fmt: skip


def test_a_metric_that_fails_in_the_second_validation_loses_no_step(fit):
    full = fit(*WORDS, BREAKS % 0, name="full")
    failed = fit(*WORDS, BREAKS % 2, code=70)
    assert "RuntimeError: the metric is broken" in failed.errors[0]
    assert failed.steps() == [2, 4]
    first, second = (read_manifest(failed.folder / f"checkpoints/step-0000000{n}") for n in (2, 4))
    assert "val/loss" in first["metrics"] and second["metrics"] == {}
    assert failed.state(4)["validated"] is False
    resumed = fit(*WORDS, BREAKS % 0, "ckpt_path=last", "allow_changes=[module.metrics]")
    for step in (4, 6):
        mismatches = differences(full.state(step), resumed.state(step))
        assert not mismatches, (step, mismatches[:8])
    assert same_rows(full.rows, resumed.rows)
    assert resumed.metrics["val/loss"] == full.metrics["val/loss"]
    # The repeated validation is added to the checkpoint, which is not saved again.
    assert (resumed.folder / "checkpoints" / "step-00000004" / NAME).is_file()


@pytest.mark.parametrize(("ranks", "first"), [((), 1), (TWO, 2)], ids=["one", "two"])
def test_rank_0_decides_for_all_ranks_when_minutes_have_passed(fit, ranks, first):
    """Only rank 0's clock moves: a rank that read its own clock would not join the save.

    The clock moves by 100 seconds whenever it is read, which is at most three times in a step.
    """
    words = (f"+callbacks.clock._target_={CALLBACKS}.Clock", "strategy.timeout_s=30", *ranks)
    saves = f"+callbacks.beats._target_={CALLBACKS}.NotesHeartbeat"
    minutes = ("checkpoint.every_minutes=1.6", "checkpoint.keep=9", "data.num_samples=64")
    run = fit(*words, *minutes, saves)
    beats = [json.loads((run.folder / f"save-{n}.json").read_text()) for n in range(first)]
    assert beats[0][0] != "save"
    assert beats[1:] == [["save", 3600.0]] * (first - 1)  # waits for the files of the first rank
    # Several ranks learn rank 0's decision one step later. The last step is always saved.
    assert run.steps() == list(range(first, 7))
    words = (*words, "checkpoint.every_minutes=3.3", "checkpoint.every_n_steps=4")
    rarely = fit(*words, "checkpoint.keep=9", name="rarely")
    # The save of step 4 restarts the interval: with one rank, step 5 is not saved.
    assert rarely.steps() == [first + 1, 4, 6]
    assert fit("checkpoint.every_minutes=0", name="never", code=2).errors


def make_callback(folder, mirror: Any = None) -> checkpoints.Checkpoints:
    options: Any = SimpleNamespace(every_minutes=2.0, every_n_steps=4, monitor=None)
    store, timeline = CheckpointStore(folder, "a" * 32), Timeline(None)
    return checkpoints.Checkpoints(store, {}, options, 4, (), "", mirror, timeline)


@pytest.mark.parametrize(
    ("n_saved", "validated", "amended"),
    [(2, False, ["step-00000003"]), (2, True, []), (1, False, []), (3, False, [])],
)
def test_a_repeated_validation_amends_a_checkpoint_of_the_same_number_of_ranks(
    monkeypatch, tmp_path, n_saved, validated, amended
):
    """A checkpoint that is not amended is saved again, with a random state of each rank."""
    paths, loaded = [], {"global_step": 3, "validated": validated, "rng": [{}] * n_saved}
    for name in ("loop_state_after", "resume_run"):
        monkeypatch.setattr(checkpoints, name, lambda *_: {})
    monkeypatch.setattr(checkpoints, "allow_amendment", lambda _, path: paths.append(path))
    trainer: Any = SimpleNamespace(
        world_size=2, global_step=3, max_steps=9, state=SimpleNamespace(fn="fit")
    )
    module, part = cast(Any, None), make_callback(tmp_path)
    part.on_load_checkpoint(trainer, module, loaded | {"threads": 1, "logged": {}})
    assert part.saved == (3, validated)
    part.on_train_start(trainer, module)
    assert [path.name for path in paths] == amended and {tmp_path} >= {p.parent for p in paths}


def test_rank_0_votes_only_for_a_step_that_is_not_saved_anyway(monkeypatch, tmp_path):
    """With several ranks a vote takes effect one step later, and would save that step as well."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(checkpoints, "monotonic", lambda: clock.now_s)
    for name in ("is_validated", "ends_epoch"):
        monkeypatch.setattr(checkpoints, name, lambda trainer, *_, name=name: trainer.next == name)
    part = make_callback(tmp_path)
    step = {"global_step": 3, "next": "", "training": True, "is_global_zero": True}

    def votes(**change):
        return part.votes_to_save(SimpleNamespace(should_stop=False, **step | change))

    clock.now_s = 119.0
    assert not votes()
    clock.now_s = 120.0
    for change in (
        {"next": "is_validated"}, {"next": "ends_epoch"}, {"global_step": 4},
        {"training": False}, {"is_global_zero": False},
    ):  # fmt: skip
        assert not votes(**change), change
    assert votes() and not votes()  # the interval starts again
    clock.now_s = 240.0
    assert votes()


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_batch_end"])
def test_a_background_save_is_completed_when_all_ranks_have_voted_that_it_is_written(
    hook, monkeypatch, tmp_path
):
    """The first call of a vote has no result yet if there are several ranks."""
    calls: list[Any] = []
    results = [None, (True,), (False,)]
    vote = SimpleNamespace(
        ask=lambda is_writing: calls.append(is_writing) or results.pop(0),
        close=lambda: calls.append("closed"),
    )
    monkeypatch.setattr(checkpoints, "Vote", lambda: vote)
    for name, value in (("ends_step", True), ("ends_epoch", False), ("is_validated", False)):
        monkeypatch.setattr(checkpoints, name, lambda *_, value=value: value)
    part = make_callback(tmp_path)
    strategy = SimpleNamespace(parallel=Parallel())
    trainer: Any = SimpleNamespace(
        global_step=3, strategy=strategy, is_global_zero=False, should_stop=False
    )
    part.store = store = cast(Any, SimpleNamespace(is_unfinished=True, progress=None))
    store.finish = lambda: calls.append("finished") or vars(store).update(is_unfinished=False)
    for store.is_writing in (True, False, False, False):
        getattr(part, hook)(trainer, None, None, None, 0)
    # The next save begins with no vote of this one, and without a save there is no vote.
    assert calls == [True, False, False, "closed", "finished"]


def test_the_end_of_a_fit_waits_for_the_mirror_also_after_a_stop_or_an_error(monkeypatch, tmp_path):
    """A launcher kills the job soon after the first rank has exited."""
    calls: list[Any] = []
    mirror = SimpleNamespace(update=calls.append, wait=lambda: calls.append("wait"))
    part, module = make_callback(tmp_path, mirror), cast(Any, None)
    for name, value in (("may_save", True), ("ends_epoch", False), ("is_validated", True)):
        monkeypatch.setattr(checkpoints, name, lambda *_, value=value: value)
    monkeypatch.setattr(part, "save", lambda _, *, validated: calls.append(validated))
    strategy = SimpleNamespace(parallel=Parallel())
    trainer: Any = SimpleNamespace(global_rank=0, global_step=3, strategy=strategy)
    copied = [part.store, "wait"]
    for end, expected in (
        (lambda: part.teardown(trainer, module, "fit"), copied),
        (lambda: part.teardown(trainer, module, "validate"), []),
        (lambda: part.on_exception(trainer, module, PreemptedError(3)), copied),
        (lambda: part.on_exception(trainer, module, PreemptedError()), []),  # before step 0
        (lambda: part.on_exception(trainer, module, RuntimeError()), []),  # before the training
    ):
        end()
        assert calls == expected
        calls.clear()
    part._rng.append((3, {}))
    part.on_exception(trainer, module, RuntimeError())
    assert calls == [False, *copied]  # the validation of the step was still to come
    assert part.store.on_commit is not None
    part.store.on_commit()  # each checkpoint is copied while the training continues
    assert calls[3:] == [part.store]


def test_the_tensors_of_a_validated_step_are_written_once(fit, monkeypatch):
    written, draft_open = Counter(), CheckpointWriter.open

    def count(draft, name):
        written[name] += 1
        return draft_open(draft, name)

    monkeypatch.setattr(CheckpointWriter, "open", count)
    run = fit(*WORDS)
    assert written == {"state.ckpt": 3, NAME: 3}
    folder = run.folder / "checkpoints/step-00000006"
    added = torch.load(folder / NAME, weights_only=True)
    assert not any(isinstance(value, torch.Tensor) for value in added["state_dict"].values())
    state, before = run.state(6), torch.load(folder / "state.ckpt", weights_only=True)
    early = next(value for name, value in state["callbacks"].items() if "EarlyStopping" in name)
    assert float(early["best_score"]) == pytest.approx(min(run.column("val/loss")))
    assert before["validated"] is False and state["validated"] is True
    assert before["state_dict"].keys() == state["state_dict"].keys()


def test_only_a_checkpoint_of_the_kind_that_the_strategy_writes_is_amended(tmp_path):
    """A run may resume under another strategy than that of the checkpoint."""
    weight = {"state_dict": {"w": torch.ones(2)}}
    store = CheckpointStore(tmp_path, "a" * 32)
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        torch.save(weight, file)
    trainer = SimpleNamespace(is_global_zero=True)
    for step, is_partitioned, is_allowed in ((1, False, True), (1, True, False), (3, False, False)):
        trainer.strategy = strategy = OneDevice(Parallel())
        strategy.own_state = dict  # the files of this rank alone have no tensors
        strategy.parallel.is_partitioned = is_partitioned
        allow_amendment(trainer, tmp_path / f"step-{step:08d}")
        assert (strategy.saved is not None) == is_allowed, step
        assert not is_allowed or list(strategy.saved[0])


@pytest.mark.parametrize(
    "hook, saved, ranks",
    [
        ("on_validation_batch_end", [2, 4], ()),
        ("on_before_backward", [2, 3], ()),
    ],
)
def test_a_callback_that_fails_loses_no_step(fit, hook, saved, ranks):
    words = (*WORDS, *ranks)
    full = fit(*words, name=None)
    step = saved[-1]
    kill = f"+callbacks.fails={{_target_: {CALLBACKS}.FailsInHook, hook: {hook}, step: {step}}}"
    failed = fit(*words, kill, code=70)
    assert failed.steps() == saved
    assert "ckpt_path=last" in failed.status["resume"]
    assert "RuntimeError: the callback is broken" in failed.status["traceback"]
    is_saved_late = saved == [2, 3]  # other steps were saved before their validation
    assert (f"step {step}, before the error" in failed.out) == is_saved_late
    if hook == "on_before_backward":  # two of the step's four samples, if there are two ranks
        samples = r"0: \d+, \d+\n|1: \d+, \d+\n" if ranks else r"0: (\d+, ){3}\d+\n"
        assert re.search(rf"at step 3, samples of rank ({samples})", failed.out), failed.out
    if hook == "on_validation_batch_end":  # the first batch of the second validation
        # The first rank that fails is reported.
        samples = ("0: 0, 1\n", "1: 2, 3\n") if ranks else ("0: 0, 1, 2, 3\n",)
        assert any(f"evaluation of data.val, samples of rank {s}" in failed.out for s in samples)
    resumed = fit(*words, "ckpt_path=last")
    assert not (mismatches := differences(full.state(6), resumed.state(6))), mismatches[:8]
    rows = [
        row for row in resumed.rows if row["step"] != "3"
    ]  # the failure may come before step 3 is logged
    assert same_rows([row for row in full.rows if row["step"] != "3"], rows)


def test_what_the_end_of_an_epoch_draws_is_drawn_once_if_the_next_step_fails(fit):
    """The epoch has four steps, and its last one is saved after the error of the fifth."""
    words = ("model.dropout=0.1", "data.num_samples=16", "trainer.limit_val_batches=0",
             f"+callbacks.draws._target_={CALLBACKS}.DrawsAtEpochEnd")  # fmt: skip
    full = fit(*words, name=None)
    fails = f"{{_target_: {CALLBACKS}.FailsInHook, hook: on_before_backward, step: 4}}"
    failed = fit(*words, f"+callbacks.fails={fails}", code=70)
    assert failed.steps() == [4] and "step 4, before the error" in failed.out
    resumed = fit(*words, "ckpt_path=last")
    assert not (mismatches := differences(full.state(6), resumed.state(6))), mismatches[:8]


def make_monitor(guard) -> TrainingMonitor:
    nothing = cast(Any, None)
    return TrainingMonitor(
        1, nothing, {}, nothing, guard, nothing, checkpoints=None, compiles=False
    )


def test_a_rank_that_is_asked_to_stop_while_it_loads_a_checkpoint_takes_no_step():
    def leave_if_asked():
        raise PreemptedError

    beats: list[Any] = []
    guard = SimpleNamespace(
        beat=lambda *of, **options: beats.append(of), leave_if_asked=leave_if_asked
    )
    trainer, module = cast(Any, SimpleNamespace(global_step=3)), cast(Any, None)
    with pytest.raises(PreemptedError):
        make_monitor(guard).on_train_start(trainer, module)
    assert not beats


def test_a_run_that_has_read_its_checkpoint_keeps_the_time_that_building_is_allowed():
    beats: list[Any] = []
    guard = SimpleNamespace(
        beat=lambda *of, **options: beats.append((of, options)),
        allow_s=600.0,
        leave_if_asked=lambda: None,
    )
    trainer, module = cast(Any, SimpleNamespace(global_step=0)), cast(Any, None)
    make_monitor(guard).on_load_checkpoint(trainer, module, {"global_step": 7})
    assert beats == [((7,), {"allow_s": 600.0})]


def test_the_rank_that_failed_is_named_by_its_global_rank_with_its_own_samples():
    """The description of the batch becomes a part of the error message of this rank."""
    beats: list[Any] = []
    guard: Any = SimpleNamespace(beat=beats.append, doing="")
    nothing, monitor = cast(Any, None), make_monitor(guard)
    read = Loader([0] * 8)
    read.name, read.number = "data.test", 2
    data = SimpleNamespace(
        step_samples=lambda step, rank: [step, rank],
        eval_batches=SimpleNamespace(samples_of=lambda number: [number, 40]),
    )
    trainer: Any = SimpleNamespace(
        loggers=[], datamodule=data, global_step=3, global_rank=5, local_rank=1, training=True,
        fit_loop=SimpleNamespace(batch_idx=0), testing=True, test_dataloaders=read,
    )  # fmt: skip
    monitor.on_exception(trainer, nothing, RuntimeError())
    # The heartbeat may have counted a step that was not taken.
    assert (guard.doing, beats) == ("step 3, samples of rank 5: 3, 5", [3])
    trainer.training = False
    monitor.on_exception(trainer, nothing, RuntimeError())
    assert guard.doing == "step 3, evaluation of data.test, samples of rank 5: 2, 40"
    trainer.test_dataloaders, guard.doing = None, "before"  # the loader of a user's data module
    monitor.on_exception(trainer, nothing, RuntimeError())
    assert (guard.doing, beats) == ("before", [3])


def test_an_error_is_reported_also_if_the_save_after_it_fails(fit):
    target = f"_target_: {CALLBACKS}.BlocksSaves, hook: on_train_batch_end, step: 3"
    failed = fit(*WORDS, f"+callbacks.blocks={{{target}}}", code=70)
    assert "warning: nothing was saved after the error: " in failed.out
    (line,) = failed.errors
    assert "RuntimeError: the callback is broken" in line
    assert [path.name for path in (failed.folder / "moved").glob("step-*")] == ["step-00000002"]


BROKEN = {
    "none": (65, "data.train: samples 15, 18, 5, 6: "),
    "short": (65, "data.train: samples 15, 18, 5, 6: "),
    "raises": (70, "the sample is broken"), "cannot be read": (73, "Permission denied"),
    "a target of -1": (65, "data.train: samples 15, 18, 5, 6: token -1"),
    "a token above the vocabulary": (65, "data.train: samples 15, 18, 5, 6: token 1250"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_sample_in_the_middle_of_an_epoch_loses_no_step(fit, kind):
    words = (f"data.train._target_={OWN}.data.Broken", f"+data.train.kind='{kind}'")
    code, message = BROKEN[kind]
    failed = fit(*words, "data.train.num_samples=24", code=code)
    step = failed.status["step"]
    assert step > 0 and failed.steps() == [step] and message in failed.errors[0]
    assert "ckpt_path=last" in failed.status["resume"]


@pytest.mark.parametrize(("n_workers", "step"), [(0, 1), (1, 0)])
def test_a_sample_that_raises_in_a_validation_is_named_by_key_and_index(fit, n_workers, step):
    words = (f"data.val._target_={OWN}.data.Broken", "+data.val.kind=raises")
    if step == 0:
        words = (*words, "trainer.num_sanity_val_steps=2")
    failed = fit(*words, f"data.num_workers={n_workers}", "trainer.max_steps=1", code=70)
    place = "in a worker" if n_workers else "in the training process"
    assert failed.errors == [
        f"error: ValueError: the sample is broken, {place}; "
        f"at step {step}, evaluation of data.val, samples of rank 0: 4, 5, 6, 7"
    ]
    assert failed.steps() == ([1] if step else [])


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_run_and_saves_nothing(fit):
    options = "hook: on_train_batch_start, step: 3, rank: 1"
    kill = f"+callbacks.fails={{_target_: {CALLBACKS}.FailsInHook, {options}}}"
    failed = fit(*WORDS, *TWO, kill, code=70)
    assert "RuntimeError: the callback is broken" in failed.out
    assert "at step 3, samples of rank 1: " in failed.out
    assert failed.steps() == [2]


@pytest.mark.slow
def test_a_failure_inside_the_optimizer_update_is_not_saved(fit, monkeypatch):
    step = torch.optim.AdamW.step

    def half(self, closure=None):
        result = step(self, closure)
        self.n_steps = getattr(self, "n_steps", 0) + 1
        if self.n_steps == 4:
            raise RuntimeError("in the middle of an update")
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", half)
    assert fit(*WORDS, code=70).steps() == [2]
