"""Modules as a Lightning user writes them."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassF1Score

from gptrain.lit import LanguageModel


class Logs(LanguageModel):
    """Logs values with each option of `self.log`, under new names."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("train/mine", loss, prog_bar=True)
        self.log("train/epoch_mean", loss, on_step=False, on_epoch=True)
        self.log("train/both", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val/mine", float(batch_idx))


class Averages(Logs):
    """Averages a weight in a hook that Lightning calls after all callbacks, and losses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.save_hyperparameters()  # one of them is the net
        self.register_buffer("average", torch.zeros(()))
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.log("train/metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(next(self.net.parameters()).detach().mean(), 0.5)


class Returns(LanguageModel):
    """Returns a dict or None from a training_step that takes only the batch."""

    def __init__(self, *args, kind, **kwargs):
        super().__init__(*args, **kwargs)
        self.kind = kind

    def training_step(self, batch):
        loss = self.loss(*batch)
        once = self.kind == "once none" and self.global_step == 2 and not self.skipped
        self.skipped |= once
        return None if once or self.kind == "none" else loss

    skipped = False


class BringsFinder(LanguageModel):
    """Adds a callback in configure_callbacks."""

    def configure_callbacks(self):
        return [BatchSizeFinder(max_trials=2)]


class LooksAhead(LanguageModel):
    """Calls backward inside training_step, as adversarial training does."""

    def training_step(self, batch):
        self.loss(*batch).backward()
        return self.loss(*batch)


class WithExtraParameters(LanguageModel):
    """A module with a parameter, two buffers and a torchmetric outside the net.

    One of the buffers belongs to a submodule and depends on the samples of the rank.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.randn(3))  # the same on all ranks
        self.register_buffer("steps_seen", torch.zeros(()))
        self.samples = nn.Module()
        self.samples.register_buffer("token_sum", torch.zeros(()))
        self.mean_loss = MeanMetric()
        self.mean_loss.persistent(True)

    def training_step(self, batch):
        loss = self.loss(*batch)
        if self.training:
            self.steps_seen = self.steps_seen + 1  # replaces the buffer
            self.samples.token_sum += batch[0].sum()
        self.mean_loss.update(loss.detach())
        return loss + (self.gain - 0.5).square().sum()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val/token_sum", self.samples.token_sum, sync_dist=True)  # mean of all ranks

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("gain", self.gain.detach().mean())

    def configure_optimizers(self):
        """One kernel for all parameters, which cannot mix those of a divided net with others."""
        return torch.optim.AdamW(self.parameters(), 0.01, fused=True)


class OwnOptimizers(LanguageModel):
    """Returns from configure_optimizers each form that Lightning accepts."""

    def __init__(self, *args, kind="none", **kwargs):
        super().__init__(*args, **kwargs)
        self.kind = kind

    def configure_optimizers(self):
        lr = torch.tensor(0.1) if self.kind == "none" else 0.1
        optimizer = torch.optim.SGD(self.parameters(), lr, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        if self.kind == "none":
            return optimizer
        if self.kind == "two":
            return [optimizer, torch.optim.SGD(self.parameters(), 0.1)]
        if self.kind == "epoch":
            return [optimizer], [schedulers.StepLR(optimizer, step_size=1, gamma=0.5)]
        plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        config = {"scheduler": plateau, "monitor": "train/loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config | {"frequency": 4}}


class InTurn(LanguageModel):
    """Two schedules, one after the other, of the optimizer of the config."""

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self)
        schedulers = torch.optim.lr_scheduler
        parts = [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
        schedule = schedulers.SequentialLR(optimizer, parts, [4])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OwnModule(OwnOptimizers, WithExtraParameters):
    """A module with parameters, buffers, an optimizer and a schedule of its own."""


class Manual(LanguageModel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False


class LateManual(LanguageModel):
    """Selects manual optimization in on_fit_start, as late as Lightning allows."""

    def on_fit_start(self):
        self.automatic_optimization = False


class OwnLoss(LanguageModel):
    """Overrides `loss`, the obvious place for another loss."""

    def loss(self, tokens, targets):
        return 2 * super().loss(tokens, targets)


class Plain(pl.LightningModule):
    """A plain LightningModule around the given net."""

    def __init__(self, net, lr=0.01):
        super().__init__()
        self.net, self.lr = net, lr

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = F.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())
        self.log("mine" if self.training else "val/loss", loss, sync_dist=not self.training)
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Supervised(pl.LightningModule):
    """A plain LightningModule that classifies points, and counts by hand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.f1 = MulticlassF1Score(2, average="micro")  # fails on a target of -100
        self.seen = 0

    def loss(self, batch):
        points, targets = batch
        outputs = self.layer(points)
        return outputs, F.cross_entropy(outputs, targets)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[1]

    def on_validation_epoch_start(self):
        self.seen = 0

    def validation_step(self, batch, batch_idx):
        outputs, loss = self.loss(batch)
        self.log("val/loss", loss, sync_dist=True)
        self.seen += len(batch[1])
        self.f1.update(outputs, batch[1])
        self.log("val/f1", self.f1)

    def on_validation_epoch_end(self):
        self.log("val/seen", self.all_gather(torch.tensor(float(self.seen))).sum())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class ClipsItself(LanguageModel):
    """Overrides Lightning's hook for clipping, as its documentation shows."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def trainer_with_loss_scaler(init_scale=2.0**16, **options):
    """Make a Trainer for precision 16-mixed on a CPU, which Lightning itself does not offer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    options["plugins"].append(MixedPrecision("16-mixed", "cpu", scaler=scaler))
    return pl.Trainer(**options | {"precision": None})
