"""What a user would write: data, losses, nets, parameter groups, and a callback that records."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import SumMetric

from gptrain.lit import LanguageModel
from gptrain.optim import decay_groups, muon
from tests.strategies.own_nets import Block, Chain

IGNORED = -100


class Ragged(Dataset):
    """Random tokens. The samples ignore different numbers of targets: means of means are wrong.

    Args:
        form: One of the forms that batches have.
    """

    def __init__(
        self, num_samples: int, seq_len: int, vocab_size: int, seed: int, form: str = "pair"
    ):
        self.num_samples, self.seq_len, self.vocab_size = num_samples, seq_len, vocab_size
        self.seed, self.form = seed, form

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        tokens, targets = tokens[:-1], tokens[1:].clone()
        targets[: index % 11] = IGNORED
        targets[-(1 + index % 3)] = IGNORED
        return {
            "pair": (tokens, targets),
            "dict": {"tokens": tokens, "targets": targets},
            "named": {"text": tokens, "next": targets},  # keys that the library does not know
            "weighted": (tokens, targets, torch.full(targets.shape, 0.5)),
        }[self.form]


class Penalised(LanguageModel):
    """Adds a term to the loss that does not depend on the targets."""

    def __init__(self, *args, penalty: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.penalty = penalty

    def training_step(self, batch):
        vectors = [p for p in self.net.parameters() if p.ndim < 2]
        return self.loss(*batch) + self.penalty * sum(p.square().sum() for p in vectors)


class FirstBlockAdamW(torch.optim.AdamW):
    """AdamW with another learning rate for the parameters of the first block."""

    @classmethod
    def parameter_groups(cls, net, parameters, names, *, first_block_lr: float):
        parameters = list(parameters)
        first = [p for p in parameters if names[p].startswith("blocks.0.")]
        rest = decay_groups(p for p in parameters if not names[p].startswith("blocks.0."))
        return rest + [group | {"lr": first_block_lr} for group in decay_groups(first)]


class Record(pl.Callback):
    """Writes what a rank got: the batches of each step and of a validation, and gradient norms."""

    def __init__(self, norms: bool = False):
        self.steps, self.val, self.norms, self.with_norms = [], [], [], norms

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.steps.append([])
        self.steps[-1].append([part.clone() for part in parts_of(batch)])

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.with_norms:
            gradients = [p.grad.norm() for p in module.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack(gradients).norm()))

    def on_validation_start(self, trainer, module):
        self.val.clear()

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.val.append([part.clone() for part in parts_of(batch)])

    def on_train_end(self, trainer, module):
        path = Path(trainer.default_root_dir) / f"batches-{trainer.global_rank}.pt"
        torch.save({"steps": self.steps, "val": self.val, "norms": self.norms}, path)


def parts_of(batch) -> list[Tensor]:
    return [*(batch.values() if isinstance(batch, dict) else batch)]


class MuonInFp32(pl.Callback):
    """Runs Muon's matrix multiplications in fp32: bf16 would turn rounding into large errors."""

    def setup(self, trainer, module, stage):
        self.native = muon.native_dtype
        muon.native_dtype = lambda device: torch.float32

    def teardown(self, trainer, module, stage):
        muon.native_dtype = self.native


# Losses: functions of `loss` (tokens, targets), the net, and a batch. LOSSES has them by name.


def thin(targets: Tensor) -> Tensor:
    """Keep every third target, as masked training does."""
    return targets.masked_fill(torch.arange(targets.shape[1]) % 3 > 0, IGNORED)


def of_outputs(loss, net, tokens, targets):
    return loss(tokens, targets) + 0.1 * net(tokens).square().mean()


def of_weights(loss, net, tokens, targets):
    return loss(tokens, targets) + 0.01 * sum(p.square().sum() for p in net.parameters())


def masked(loss, net, tokens, targets):
    return of_outputs(loss, net, tokens, thin(targets))


def masked_in_place(loss, net, tokens, targets):
    return loss(tokens, targets.copy_(thin(targets)))


def backwards(loss, net, tokens, targets):
    back = tokens.flip(1)
    return loss(tokens, targets) + 0.3 * loss(back, back.roll(-1, 1))


def unreturned(loss, net, tokens, targets):
    returned = loss(tokens, targets)
    loss(tokens, targets)
    return returned


LOSSES = {
    "plain": lambda loss, net, *batch: loss(*batch),
    "weights": of_weights, "outputs": of_outputs, "masked": masked,
    "in place": masked_in_place, "backwards": backwards, "unreturned": unreturned,
    "twice": lambda loss, net, *batch: loss(*batch) + loss(*batch),
    "quarter": lambda loss, net, *batch: 0.25 * loss(*batch),
}  # fmt: skip


class OwnLosses(LanguageModel):
    """Trains with another loss in each step.

    Args:
        losses: Names in LOSSES, one for each step.
    """

    def __init__(self, *args, losses, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses = losses

    def training_step(self, batch, batch_idx):
        tokens, targets, *_ = parts_of(batch)
        return LOSSES[self.losses[self.global_step]](self.loss, self.net, tokens, targets)

    def validation_step(self, batch, batch_idx):
        self.evaluate(*parts_of(batch)[:2])


class MaskedOnTheWay(OwnLosses):
    """Masks targets where Lightning's documentation changes batches."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        tokens, targets = batch
        return tokens, thin(targets)


class ClipsInHook(OwnLosses):
    """Clips in a hook that sees the gradients before the optimizer does."""

    def on_before_optimizer_step(self, optimizer):
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class ClipsByTrainer(OwnLosses):
    """Clips in Lightning's hook by Lightning's method."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, 0.5, gradient_clip_algorithm)


class ClipsLater(pl.Callback):
    """A callback that clips from the third step on."""

    def on_after_backward(self, trainer, module):
        if trainer.global_step >= 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)


# Nets


class SkipsBlocks(Chain):
    def body(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.9:
                x = block(x)
        return self.norm(x)


class SharesActivation(Chain):
    """A chain in which one layer without parameters stands twice."""

    def __init__(self, vocab_size=64):
        super().__init__(vocab_size)
        shared = nn.Tanh()
        self.blocks = nn.ModuleList(m for block in self.blocks for m in (block, shared))


class Normalized(Block):
    """A block that normalizes over the batch, which changes running averages."""

    def __init__(self, width, *sizes):
        super().__init__(width, *sizes)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.batch_norm(super().forward(x).mT).mT


class BatchNormNet(Chain):
    block = Normalized


class Experts(Block):
    """Experts of two sizes; each position goes to one of them."""

    def __init__(self, width, *sizes):
        super().__init__(width, *sizes)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, n), nn.Linear(n, width)) for n in 6 * (4, 5)
        )

    def forward(self, x):
        x = super().forward(x)
        choice = x.detach().argmax(-1) % len(self.experts)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (rows := choice == i).any():
                y[rows] = expert(x[rows])
        return x + y


class MixtureOfExperts(Chain):
    block = Experts


# Sums


class Sums(LanguageModel):
    """Counts targets in each way in which Lightning and torchmetrics sum over ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metric = SumMetric()

    def training_step(self, batch, batch_idx):
        self.log("train/n", float(batch[1].numel()), reduce_fx="sum", sync_dist=True, on_step=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        n_targets = float(batch[1].numel())
        self.log("val/n", n_targets, reduce_fx="sum", sync_dist=True)
        self.metric.update(n_targets)
        self.log("val/metric", self.metric)
        super().validation_step(batch, batch_idx)


class CountsBatches(pl.Callback):
    """A callback that sums with a metric of its own."""

    def __init__(self):
        self.metric = SumMetric()

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.metric.update(float(batch[1].numel()))

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/callback", self.metric.compute())
