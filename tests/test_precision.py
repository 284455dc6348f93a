"""trainer.precision=auto chooses a native precision of the device, and the run prints it."""

from __future__ import annotations

import math

import pytest
import torch

from gptrain.runtime.devices import RunDevices, native_precision

AMPERE, TURING = 8, 7


@pytest.mark.parametrize(
    "accelerator, cuda_major, precision",
    [
        ("cuda", AMPERE, "bf16-mixed"),
        ("cuda", AMPERE + 1, "bf16-mixed"),
        ("cuda", TURING, "32-true"),  # Turing emulates bf16
        ("cpu", 0, "32-true"),
        ("mps", 0, "32-true"),
    ],
)
def test_bf16_is_taken_on_gpus_where_it_is_native(accelerator, cuda_major, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (cuda_major, 0))
    assert native_precision(RunDevices(accelerator, 1, 1)) == precision


def test_a_run_prints_its_precision_and_a_resumed_run_keeps_that_of_its_first_start(train):
    run = train("trainer.precision=bf16-mixed", "trainer.max_steps=1")
    assert run.code == 0 and "precision bf16-mixed" in run.out, run.err
    assert "(measured, bfloat16)" in run.out  # the peak to which perf/mfu is relative
    resumed = train("trainer.max_steps=2", "ckpt_path=last")
    assert resumed.code == 0 and "precision bf16-mixed" in resumed.out, resumed.err


def test_a_step_in_fp64_is_that_of_fp32(train):
    """Dummy data is random, so that the loss stays at ln V."""
    run = train("trainer.precision=64-true", "logger=none", "trainer.max_steps=1")
    assert run.metrics["val/loss"] == pytest.approx(math.log(256), rel=0.02)
    assert {weight.dtype for weight in run.state(1)["weights"].values()} == {torch.float64}


@pytest.mark.parametrize("fused", [True, False])
def test_under_a_loss_scaler_gradients_are_clipped_by_their_own_norm(fused):
    """A fused AdamW takes the scale away itself, after clipping."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins import MixedPrecision

    from gptrain.data import DummyTextDataset, collate
    from gptrain.lit import LanguageModel
    from gptrain.lit.strategies.base import OneDevice
    from gptrain.models import SimpleGPT
    from gptrain.parallel.base import Parallel

    net = SimpleGPT(31, 16, n_heads=2, n_layers=1, max_seq_len=8, dropout=0.0)
    module = LanguageModel(net, lambda m: torch.optim.AdamW(m.parameters(), fused=fused))
    data = torch.utils.data.DataLoader(DummyTextDataset(8, 9, 31), 8, collate_fn=collate)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    strategy = OneDevice(Parallel())
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, gradient_clip_val=0.5, logger=False, strategy=strategy,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
    )  # fmt: skip
    trainer.fit(module, data)
    assert 0.05 < strategy.grad_norm < 50
