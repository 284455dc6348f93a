"""Data, modules and callbacks as a user writes them, and a function that trains them.

Each module records the batches of its ranks, so that a loop of plain torch can train on the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset

from gptrain.lit import LanguageModel

OWN = "tests.truth.own_losses"
IGNORED = -100
V, T = 32, 12  # size of the vocabulary, tokens of a sample
NET = {"vocab_size": V, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": T}
MODEL = ("model=gpt_nano", *(f"model.{key}={value}" for key, value in NET.items()))
WORDS = (
    *MODEL, "seed=5", f"data.train._target_={OWN}.Uneven", f"data.val._target_={OWN}.Uneven",
    "data.num_samples=96", "data.seq_len=12", "data.val.num_samples=8",
    "optimizer._target_=torch.optim.SGD",
    "~optimizer.betas", "~optimizer.eps", "optimizer.fused=false", "+optimizer.momentum=0.9",
    "optimizer.weight_decay=0", "optimizer.lr=0.1", "scheduler=constant",
    "trainer.accelerator=cpu", "trainer.max_steps=4", "trainer.log_every_n_steps=1",
    "trainer.gradient_clip_val=null", "trainer.enable_progress_bar=false", "data.batch_size=4",
    "logger=none", "callbacks=none", "checkpoint=none",
)  # fmt: skip
RUN_NUMBERS = count()


@dataclass
class Seen:
    """What a run printed and logged, and what its module has recorded on each rank.

    Attributes:
        batches: Tokens and targets (B, T) of each micro-step, for each rank.
        norms: Gradient norm that a hook has computed in each step, for each rank.
    """

    code: int
    text: str
    rows: list[dict[str, float]]
    batches: list[list[tuple[torch.Tensor, torch.Tensor]]]
    norms: list[list[float]]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("error: ")]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


def see(train: Callable, module: str, *words: str) -> Seen:
    """Train a module of this file with WORDS and other overrides, by the fixture `train`."""
    words = (*WORDS, f"module._target_={OWN}.{module}", *words)
    run = train(*words, name=f"run-{next(RUN_NUMBERS)}", tiny=False)
    path = run.folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    seen = [torch.load(path) for path in sorted(run.folder.glob("seen-*.pt"))]
    batches, norms = zip(*seen, strict=True) if seen else ((), ())
    rows = [json.loads(line) for line in lines]
    return Seen(run.code, run.out + run.err, rows, [*batches], [*norms])


class Uneven(Dataset):
    """Samples in which between one and T targets count.

    Args:
        form: "pair" (tokens, targets), "dict", "weighted" (a third item of floats), or "named" (a
            dict whose keys the library does not know).
    """

    def __init__(self, num_samples, seq_len, vocab_size, seed, form="pair"):
        self.n, self.form = num_samples, form

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(V, (T + 1,), generator=generator)
        tokens, targets = tokens[:-1], tokens[1:].clone()
        targets[1 + index * 7 % T :] = IGNORED
        if self.form == "dict":
            return {"tokens": tokens, "targets": targets}
        if self.form == "named":
            return {"text": tokens, "next": targets}
        if self.form == "weighted":
            return tokens, targets, torch.full((T,), 0.5)
        return tokens, targets


def thin(targets: torch.Tensor) -> torch.Tensor:
    """Keep every third target, as masked training does."""
    skipped = torch.arange(targets.shape[1]) % 3 > 0
    return targets.masked_fill(skipped, IGNORED)


def norm_of(module: torch.nn.Module) -> torch.Tensor:
    """Return the norm of all gradients, as a user writes it."""
    return torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()


class Recorded(LanguageModel):
    """Keeps the batches of this rank, and the gradient norm that the hook of each step sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches, self.norms = [], []

    def training_step(self, batch, batch_idx):
        items = batch.values() if isinstance(batch, dict) else batch
        tokens, targets, *_ = items
        self.batches.append((tokens.clone(), targets.clone()))
        return self.loss_of(batch, tokens, targets)

    def loss_of(self, batch, tokens, targets):
        return self.loss(tokens, targets)

    def validation_step(self, batch, batch_idx):
        tokens, targets, *_ = batch.values() if isinstance(batch, dict) else batch
        self.evaluate(tokens, targets)

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(float(norm_of(self)))

    def on_train_end(self):
        path = Path(self.trainer.default_root_dir) / f"seen-{self.trainer.global_rank}.pt"
        torch.save((self.batches, self.norms), path)


class WeightPenalty(Recorded):
    """Adds a penalty on the weights."""

    def loss_of(self, batch, tokens, targets):
        penalty = sum(p.square().sum() for p in self.net.parameters())
        return self.loss(tokens, targets) + 0.01 * penalty


class LogitPenalty(Recorded):
    """Adds a penalty on the outputs of the net."""

    def loss_of(self, batch, tokens, targets):
        return self.loss(tokens, targets) + 0.1 * self(tokens).square().mean()


class MaskedPenalty(Recorded):
    """Trains on a third of the targets, and adds a penalty on the outputs of the net."""

    def loss_of(self, batch, tokens, targets):
        return self.loss(tokens, thin(targets)) + 0.1 * self(tokens).square().mean()


class MaskedInPlace(Recorded):
    """Changes the targets of the batch itself."""

    def loss_of(self, batch, tokens, targets):
        targets.copy_(thin(targets))
        return self.loss(tokens, targets)


class MaskedOnTheWay(Recorded):
    """Masks targets where Lightning's documentation changes batches."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        tokens, targets = batch
        return tokens, thin(targets)


class MaskedLater(Recorded):
    """Masks targets from the second step on."""

    def loss_of(self, batch, tokens, targets):
        return self.loss(tokens, thin(targets) if self.global_step else targets)


class Ramp(Recorded):
    """Multiplies the loss by a weight that is 1 in the first steps."""

    def loss_of(self, batch, tokens, targets):
        weight = 1.0 if self.global_step < 2 else 0.25
        return weight * self.loss(tokens, targets)


class TwoLosses(Recorded):
    """Adds the loss of the reversed sequence at a lower weight."""

    def loss_of(self, batch, tokens, targets):
        back = tokens.flip(1)
        return self.loss(tokens, targets) + 0.3 * self.loss(back, back.roll(-1, 1))


class SameTwice(Recorded):
    """Runs the net twice on the same targets."""

    def loss_of(self, batch, tokens, targets):
        return self.loss(tokens, targets) + self.loss(tokens, targets)


class Unreturned(Recorded):
    """Computes a loss that it does not return."""

    def loss_of(self, batch, tokens, targets):
        loss = self.loss(tokens, targets)
        if self.global_step >= 2:
            self.loss(tokens, targets)
        return loss


class ClipsInHook(Recorded):
    """Clips in a hook that sees the gradients before the optimizer does."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)


class ClipsByTrainer(Recorded):
    """Clips in this method by the method of the module."""

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, 0.5, gradient_clip_algorithm)


class ClipsLater(pl.Callback):
    """A callback that clips from the third step on."""

    def on_after_backward(self, trainer, module):
        if trainer.global_step >= 2:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
