"""The parts of a run that is built in this process and not started have the config's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import OmegaConf

from gptrain.assemble import run as assemble
from gptrain.assemble import trainer as trainer_of
from gptrain.assemble.report import parameters_text, typed_options
from gptrain.assemble.run import TrainingRun
from gptrain.checkpoints.lock import RunLock
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.core.strategies import ParallelDims
from gptrain.lit.user_data import USER_DATA, SeedAfterSetup
from gptrain.runtime.devices import RunDevices
from gptrain.runtime.process import Process
from tests.command_line import compose_run, unwatched

SMALL = (
    "model=gpt_nano", "trainer=cpu", "model.n_layers=2", "model.d_model=32", "callbacks=none",
    "trainer.enable_progress_bar=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Callable[..., TrainingRun]:
    """Return a function that builds a small run with the given overrides."""

    def build(*words: str) -> TrainingRun:
        folder = tmp_path_factory.mktemp("built")
        cfg = compose_run(*SMALL, f"run_dir={folder}/run", f"output_dir={folder}", *words)
        with RunLock(cfg.run_dir):
            return assemble.build(cfg, unwatched(cfg))

    return build


def test_a_line_has_all_parameters_and_those_that_are_trained():
    assert parameters_text(50_000, 50_000) == "50,000 parameters"
    assert parameters_text(90_000, 8_000) == "8,000 of 90,000 parameters are trained"


def test_the_options_that_a_logger_compares_are_those_that_distinguish_the_run(monkeypatch):
    """Folders are left out, and so are overrides that all jobs of a sweep share."""
    shared = {"override_dirname": {"exclude_keys": ["trainer.max_steps"]}}
    words = ["model=gpt_nano", "seed=3", "optimizer.betas=[0.8,0.9]", "+trainer.min_epochs=2"]
    cfg = compose_run(*words, "trainer.max_steps=5", "run_dir=a", "logger=csv")
    typed = [*words, "trainer.max_steps=5", "run_dir=a", "logger=csv", "~callbacks.sample"]
    assert typed_options(cfg) == {}  # without Hydra
    hydra = OmegaConf.create({"job": {"config": shared}, "overrides": {"task": typed}})
    monkeypatch.setattr(HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(HydraConfig, "initialized", lambda: True)
    assert typed_options(cfg) == {
        "model": "gpt_nano", "seed": 3, "optimizer.betas": "[0.8,0.9]", "trainer.min_epochs": 2,
    }  # fmt: skip


def test_runs_of_other_kinds_leave_parts_out(build):
    def names(run: TrainingRun) -> list[str]:
        return [type(callback).__name__ for callback in cast(Any, run.trainer).callbacks]

    tried = build("trainer.fast_dev_run=2")
    assert tried.trainer.max_steps == 2 and names(tried) == [
        "TrainingMonitor",
        "StepGuard",
        "QuietCollector",
    ]
    assert [type(logger) for logger in tried.trainer.loggers] == [DummyLogger]
    quick = build("trainer.fast_dev_run=true", "logger=none")  # without metrics.jsonl
    assert [type(logger) for logger in quick.trainer.loggers] == [DummyLogger]
    evaluated = build("task=validate", "data.batch_size=3")
    assert names(evaluated) == ["TrainingMonitor", "StepGuard", "QuietCollector"]
    assert evaluated.report.lines["batch"] == "3 x 1 ranks"
    words = (
        "trainer.max_time=00:01:00:00", "scheduler=warmup_constant", "checkpoint=none",
        "model.compile=blocks",  # a CPU compiles only what the user has typed
    )  # fmt: skip
    endless = build(*words, "trainer.enable_progress_bar=true")
    assert (endless.trainer.max_steps, endless.trainer.max_epochs) == (-1, -1)
    assert names(endless) == [
        "TrainingMonitor",
        "StepGuard",
        "QuietCollector",
        "ProgressBar",
        "Timer",
    ]
    assert " per step · no end · lr " in endless.report.lines["batch"]
    assert endless.cfg.model.compile == "none"


def test_a_rank_reads_the_samples_of_its_data_rank_and_draws_its_own_dropout(build):
    """Rank 3 of two data-parallel ranks, each of which is a tensor group of two."""
    process = Process(rank=3, local_rank=0, world_size=4)
    make = assemble.build_strategy

    def build_single(
        make_net: Any, options: Any, dims: ParallelDims, *rest: Any, **more: Any
    ) -> Any:
        return make(make_net, options, ParallelDims(), *rest, **more)

    with (
        patch.object(assemble, "build_strategy", build_single),
        patch.object(assemble, "this_process", lambda: process),
        patch.object(assemble, "parallel_dims", lambda *_: ParallelDims(data=2, tensor=2)),
    ):
        # A validation of the user's own needs a sample for each data rank, not for each rank.
        own = ("module._target_=tests.lit.own.modules.CrossEntropy", "data.val.num_samples=3")
        data: Any = build("seed=5", "checkpoint=none", *own).datamodule
    assert (data.rank, data.world_size, data.ranks_per_sample) == (1, 2, 2)
    assert torch.initial_seed() == 5 + 1 + 3


def test_a_users_data_module_is_cut_to_complete_steps_and_seeds_each_rank(build):
    """An epoch of nine batches has four steps of two micro-batches."""
    data = ("~data", "+data._target_=tests.lit.own.data.DataModule", "+data.num_samples=44")
    steps = ("trainer.accumulate_grad_batches=2", "trainer.max_epochs=3", "checkpoint=none")
    process = Process(rank=1, local_rank=0, world_size=2)
    with patch.object(assemble, "this_process", lambda: process):
        run = build(*data, *steps, "seed=5", "trainer.val_check_interval=3")
    trainer = cast(Any, run.trainer)
    data_facts = getattr(run.datamodule, USER_DATA)
    assert (data_facts.lengths.epoch_steps, data_facts.lengths.validate_every) == (4, 3)
    assert trainer.val_check_interval == 6  # micro-batches
    assert (trainer.limit_train_batches, trainer.max_steps, trainer.max_epochs) == (8, 12, 3)
    assert trainer._accelerator_connector.use_distributed_sampler
    first = trainer.callbacks[0]
    assert isinstance(first, SeedAfterSetup)
    first.setup(trainer, cast(Any, None), "fit")  # after the module's own, with the seed 5
    assert torch.initial_seed() == first.seed == 5 + 1 + 1


def test_lightning_is_told_the_ranks_of_a_node_and_the_number_of_nodes(tmp_path):
    """Lightning divides the samples of a user's data module over nodes x ranks of a node."""
    cfg = compose_run(*SMALL, "checkpoint=none", f"run_dir={tmp_path}", f"output_dir={tmp_path}")
    lengths = RunLengths(BatchPlan(2, 6, 3), 4, epoch_steps=5, n_steps=7, validate_every=4)
    devices, data, nothing = RunDevices("cpu", 2, 3), cast(Any, [0] * 180), cast(Any, None)
    with (
        patch.object(trainer_of, "get_method", lambda _: dict),
        patch.object(trainer_of, "disable_signals_and_autoresume", lambda options: options),
    ):
        made = trainer_of.build_trainer(cfg, devices, nothing, lengths, unwatched(cfg), data)
    options = cast(Any, made)
    assert (options["num_nodes"], options["devices"]) == (3, 2)
    assert [plugin.n_local for plugin in options["plugins"]] == [2]
    assert (options["max_steps"], options["accumulate_grad_batches"]) == (7, 3)
    assert options["val_check_interval"] == 3 * 4 and options["limit_train_batches"] is None


def test_a_masked_sample_that_is_longer_than_the_context_of_the_net_is_refused(build, tmp_path):
    """The check of `data.seq_len` does not see the length of a dataset that sets its own."""
    (tmp_path / "text.txt").write_text("a line of the text\n" * 100)
    data = ("data=text", f"data.path={tmp_path}", "data.documents=masked", "data.seq_len=16")
    message = "a sample has 24 positions; try: model.max_seq_len=24"
    with pytest.raises(ConfigError, match=f"^error: model.max_seq_len=16: {message}$"):
        build(*data, "model.max_seq_len=16", "data.train.seq_len=24")
