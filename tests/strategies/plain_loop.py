"""A training loop of plain torch that knows nothing of gptrain: the truth for every strategy.

A step has one batch with all of its sequences, and its loss is `F.cross_entropy` over all of its
targets. So micro-steps and ranks, which divide a step, are not in this file at all.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Recipe:
    """Options of the training, named like the paper's symbols or torch's arguments."""

    lr: float
    first_block_lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    label_smoothing: float
    warmup_steps: int
    total_steps: int
    start_factor: float
    min_factor: float

    def factor_at(self, step: int) -> float:
        """Return the factor of the learning rates of a step: a linear warm-up, half a cosine."""
        if step < self.warmup_steps:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup_steps
        done = (step - self.warmup_steps) / (self.total_steps - 1 - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * done)) / 2
        return self.min_factor + (1 - self.min_factor) * cosine


@dataclass
class History:
    """The logged values of every step, and the weights after the step."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def train(net: nn.Module, batches: list[tuple[Tensor, Tensor]], recipe: Recipe) -> History:
    """Train `net` in place with one optimizer step per batch.

    Args:
        net: The model, tokens (B, T) -> logits (B, T, V), with a list `blocks`.
        batches: Tokens and targets (B, T) of every step. A target of -100 does not count.
        recipe: Options of the loss, the optimizer and the schedule.
    """
    first = set(net.blocks[0].parameters())
    groups = []
    for p in net.parameters():
        decay = recipe.weight_decay if p.ndim >= 2 else 0.0
        peak_lr = recipe.first_block_lr if p in first else recipe.lr
        groups.append({"params": [p], "weight_decay": decay, "peak_lr": peak_lr})
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas, eps=recipe.eps)
    history = History()
    for step, (tokens, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.factor_at(step) * group["peak_lr"]
        logits = net(tokens).flatten(0, 1)  # (B, T, V) -> (B * T, V)
        smoothing = recipe.label_smoothing
        loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), recipe.max_norm)
        optimizer.step()
        history.losses.append(loss.item())
        history.gradient_norms.append(norm.item())
        history.lrs.append(recipe.factor_at(step) * recipe.lr)
        history.weights.append({name: w.detach().clone() for name, w in net.state_dict().items()})
    return history
