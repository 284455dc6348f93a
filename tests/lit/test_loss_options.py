"""Label smoothing and z-loss from the config equal torch's formulas, in training only."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import gptrain
from gptrain.data import DummyTextDataset
from tests.lit.conftest import OWN


def expected(net, samples, smoothing, z_loss) -> tuple[float, float]:
    """Return the training loss and the plain loss, by F.cross_entropy over the full logits."""
    dataset = DummyTextDataset(64, 17, 256, 42)
    tokens, targets = dataset.__getitems__(samples)
    with torch.no_grad():
        logits = net(tokens).flatten(0, 1)  # (N, V)
    plain = F.cross_entropy(logits, targets.flatten())
    loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
    return float(loss + z_loss * logits.logsumexp(-1).square().mean()), float(plain)


@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 1e-2), (0.2, 1e-3)])
def test_the_training_loss_equals_torchs_and_the_validation_loss_is_plain(fit, smoothing, z_loss):
    options = (f"module.loss.label_smoothing={smoothing}", f"module.loss.z_loss={z_loss}")
    words = (
        "data.num_samples=4", "data.val.num_samples=4", "data.val.seed=42", "scheduler=constant",
        "trainer.max_steps=3", "optimizer.lr=0.01", "trainer.val_check_interval=1",
    )  # fmt: skip
    run = fit(*words, *options, "checkpoint.every_n_steps=1", "checkpoint.keep=9")
    for step in (1, 2):  # the weights after this step give the next step's loss
        net = gptrain.load(run.folder / "checkpoints" / f"step-{step:08d}")
        loss, plain = expected(net, [0, 1, 2, 3], smoothing, z_loss)
        assert run.column("train/loss")[step] == pytest.approx(loss, rel=1e-5)
        assert run.column("val/loss")[step - 1] == pytest.approx(plain, rel=1e-5)


def test_loss_options_work_for_a_net_without_the_chunked_loss(fit):
    gone = ("d_model", "n_heads", "n_layers", "max_seq_len", "dropout", "activation")
    net = (f"model._target_={OWN}.nets.Tied", "+model.width=8", *(f"~model.{key}" for key in gone))
    plain = fit(*net, "trainer.max_steps=1", name="plain")
    smooth = fit(*net, "module.loss.label_smoothing=0.5", "trainer.max_steps=1", name="smooth")
    assert smooth.column("train/loss") != plain.column("train/loss")
