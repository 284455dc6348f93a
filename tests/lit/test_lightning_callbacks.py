"""Each of Lightning's callbacks works in a run and in a resumed one, or is refused in one line."""

from __future__ import annotations

import shutil

import pytest
import torch
from lightning.pytorch import callbacks as of_lightning

from tests.lit.conftest import OWN, differences

LIGHTNING, CALLBACKS = "lightning.pytorch.callbacks", f"{OWN}.callbacks"
BAR = "trainer.enable_progress_bar=true"
TWO = ("trainer.devices=2", "strategy.timeout_s=60")
FUNCTION = "{_target_: hydra.utils.get_method, path: %s}"
# Callbacks that are together in a run, with their options, and the words of this run.
WORKS = (
    (
        {
            "Callback": "",
            "Checkpoint": "",
            "DeviceStatsMonitor": "cpu_stats: true",
            "LambdaCallback": f"on_train_end: {FUNCTION % 'builtins.print'}",
            "LearningRateMonitor": "",
            "ModelSummary": "max_depth: 2",
            "OnExceptionCheckpoint": "dirpath: ${run_dir}/exception",
            "ProgressBar": "",
            "ThroughputMonitor": f"batch_size_fn: {FUNCTION % 'builtins.len'}, window_size: 2",
            "Timer": "duration: '00:01:00:00'",
            "WeightAveraging": "",
        },
        (BAR,),
    ),
    (
        {
            "EMAWeightAveraging": "decay: 0.5",
            "EarlyStopping": "monitor: val/loss, patience: 99",
            "ModelCheckpoint": "monitor: val/loss, save_last: true",
            "TQDMProgressBar": "refresh_rate: 2",
        },
        (BAR, *TWO),
    ),
    ({"RichModelSummary": "", "RichProgressBar": ""}, (BAR,)),
)
# tests/refused shows how these are refused.
REFUSED = """BackboneFinetuning BaseFinetuning BasePredictionWriter BatchSizeFinder
GradientAccumulationScheduler LearningRateFinder ModelPruning SpikeDetection
StochasticWeightAveraging"""


def named(name: str, options: str = "", key: str = "mine") -> str:
    target = name if "." in name else f"{LIGHTNING}.{name}"
    options = f", {options}" if options else ""
    return f"+callbacks.{key}={{_target_: {target}{options}}}"


def test_every_callback_of_lightning_is_known_to_work_or_to_be_refused():
    works = {name for callbacks, _ in WORKS for name in callbacks}
    assert works | {*REFUSED.split()} == {*of_lightning.__all__}


@pytest.mark.parametrize("callbacks, more", WORKS, ids=["one rank", "two ranks", "rich"])
def test_supported_callbacks_work_in_a_new_and_in_a_resumed_run(fit, callbacks, more):
    pytest.importorskip("rich" if "RichProgressBar" in callbacks else "psutil")
    parts = [named(name, options, key=name.lower()) for name, options in callbacks.items()]
    words = (*parts, *more, "trainer.val_check_interval=1", "checkpoint.keep=9")
    assert fit(*words, "trainer.max_steps=2").steps() == [1, 2]
    resumed = fit(*words, "trainer.max_steps=3", "ckpt_path=last")
    assert resumed.steps() == [1, 2, 3] and len(resumed.rows) >= 3
    assert "fit(ckpt_path=" not in resumed.out  # Lightning did not choose a checkpoint by itself


@pytest.mark.parametrize(
    "words",
    [
        [f"module._target_={OWN}.modules.BringsFinder"],
    ],
)
def test_an_unsupported_callback_is_found_in_a_subclass_a_function_and_a_module(fit, words):
    run = fit(*words, code=2, begun=True)
    assert "Finder: " in run.errors[0] and "data.batch_size=<n>" in run.errors[0]


def test_a_run_never_starts_from_a_file_that_the_user_did_not_name(fit, tmp_path, monkeypatch):
    """Another run's OnExceptionCheckpoint file and a file with SLURM's name are ignored."""
    left = tmp_path / "left"
    words = (named("OnExceptionCheckpoint", f"dirpath: {left}"), "scheduler=constant")
    fit(*words, f"+callbacks.fails._target_={CALLBACKS}.Fails", code=70)
    assert torch.load(left / "on_exception.ckpt", weights_only=True)["global_step"] == 3
    monkeypatch.setenv("SLURM_NTASKS", "1")  # Lightning detects SLURM by this variable
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    new = ("optimizer.lr=1e-2", "seed=7")
    folder = tmp_path / "new"
    folder.mkdir()
    shutil.copy(left / "on_exception.ckpt", folder / "hpc_ckpt_3.ckpt")
    run, alone = fit(*words, *new, name="new"), fit("scheduler=constant", *new, name="alone")
    assert len(run.rows) == 6 and run.column("lr") == [1e-2] * 6
    assert not differences(run.state(6)["state_dict"], alone.state(6)["state_dict"])
