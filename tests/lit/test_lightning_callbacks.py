"""Each of Lightning's callbacks works in a run and in a resumed one, or is refused in one line."""

from __future__ import annotations

import shutil

import pytest
import torch
from lightning.pytorch import callbacks as of_lightning

from tests.lit.fit import CALLBACKS, LIGHTNING, MODULES, TWO, fit
from tests.run import same

BAR = "trainer.enable_progress_bar=true"
FUNCTION = "{_target_: hydra.utils.get_method, path: %s}"
# Callbacks that are together in a run, with their options.
WORKS = {
    "one rank": {
        "Callback": "", "Checkpoint": "", "LearningRateMonitor": "", "ProgressBar": "",
        "WeightAveraging": "", "DeviceStatsMonitor": "cpu_stats: true",
        "LambdaCallback": f"on_train_end: {FUNCTION % 'builtins.print'}",
        "ModelSummary": "max_depth: 2", "Timer": "duration: '00:01:00:00'",
        "OnExceptionCheckpoint": "dirpath: ${run_dir}/exception",
        "ThroughputMonitor": f"batch_size_fn: {FUNCTION % 'builtins.len'}, window_size: 2",
    },
    "two ranks": {
        "EMAWeightAveraging": "decay: 0.5", "TQDMProgressBar": "refresh_rate: 2",
        "EarlyStopping": "monitor: val/loss, patience: 99",
        "ModelCheckpoint": "monitor: val/loss, save_last: true",
    },
    "rich": {"RichModelSummary": "", "RichProgressBar": ""},
}  # fmt: skip
# tests/refused shows how these are refused.
REFUSED = """BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder
GradientAccumulationScheduler LearningRateFinder ModelPruning SpikeDetection
StochasticWeightAveraging"""


def named(name: str, options: str = "") -> str:
    options = f", {options}" if options else ""
    return f"+callbacks.{name.lower()}={{_target_: {LIGHTNING}.{name}{options}}}"


def test_every_callback_of_lightning_is_known_to_work_or_to_be_refused():
    works = {name for callbacks in WORKS.values() for name in callbacks}
    assert works | {*REFUSED.split()} == {*of_lightning.__all__}


@pytest.mark.parametrize("where", WORKS)
def test_supported_callbacks_work_in_a_new_and_in_a_resumed_run(where, tmp_path):
    pytest.importorskip("rich" if where == "rich" else "psutil")
    parts = [named(name, options) for name, options in WORKS[where].items()]
    parts += TWO if where == "two ranks" else ()
    words = (*parts, BAR, "trainer.val_check_interval=1", "checkpoint.keep=9")
    assert fit(*words, "trainer.max_steps=2", folder=tmp_path / "run").steps == [1, 2]
    again = fit(*words, "trainer.max_steps=3", "ckpt_path=last", folder=tmp_path / "run")
    assert again.steps == [1, 2, 3] and len(again.rows) >= 3
    assert "fit(ckpt_path=" not in again.out  # Lightning did not choose a checkpoint by itself


def test_an_unsupported_callback_is_found_in_a_module():
    line = fit(f"{MODULES}.BringsFinder", code=2).errors[0]
    assert "Finder: " in line and "data.batch_size=<n>" in line


def test_a_run_never_starts_from_a_file_that_the_user_did_not_name(tmp_path, monkeypatch):
    """Another run's OnExceptionCheckpoint file and a file with SLURM's name are ignored."""
    left, new = tmp_path / "left", tmp_path / "new"
    fails = f"{{_target_: {CALLBACKS}.Stop, how: error, at: on_train_batch_end, step: 3}}"
    words = (named("OnExceptionCheckpoint", f"dirpath: {left}"), "scheduler=constant")
    fit(*words, f"+callbacks.fails={fails}", code=70)
    assert torch.load(left / "on_exception.ckpt", weights_only=True)["global_step"] == 3
    monkeypatch.setenv("SLURM_NTASKS", "1")  # Lightning detects SLURM by this variable
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    new.mkdir()
    shutil.copy(left / "on_exception.ckpt", new / "hpc_ckpt_3.ckpt")
    other = ("optimizer.lr=1e-2", "seed=7")
    run, alone = fit(*words, *other, folder=new), fit("scheduler=constant", *other)
    assert len(run.rows) == 6 and run.column("lr") == [1e-2] * 6
    assert not same(run.state()["weights"], alone.state()["weights"])
