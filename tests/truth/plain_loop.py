"""A training loop of plain torch that knows nothing of gptrain: the truth for every strategy.

A step has one batch with all of its sequences, and its loss is `F.cross_entropy` over all of its
targets. So micro-steps and ranks, which divide a step, are not in this file at all.
"""

import copy
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]  # tokens and targets (B, T), and the number of each token's document


@dataclass
class Recipe:
    """Options of the training, named like the paper's symbols or torch's arguments.

    Attributes:
        lrs: Peak learning rates of kinds of parameters (`kind_of`), where they are not `lr`.
        momentum: Momentum of Muon for the matrices of the blocks. None: AdamW for all.
        penalty: Factor of the sum of the squares of all vectors, which is added to the loss.
        ema_decay: Decay of the average of the weights that is validated. None: no average.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    schedule: str = "warmup_cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    total_steps: int = 0
    start_factor: float = 1.0
    min_factor: float = 0.0
    lrs: dict[str, float] = field(default_factory=dict)
    momentum: float | None = None
    penalty: float = 0.0
    ema_decay: float | None = None

    def factor_at(self, step: int) -> float:
        """Return the factor of the learning rates of a step: a linear warm-up, then a decay."""
        if step < self.warmup_steps:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup_steps
        if self.schedule == "warmup_constant":
            return 1.0
        decay_steps = self.decay_steps or self.total_steps - 1 - self.warmup_steps
        done = max(0.0, 1 - (self.total_steps - 1 - step) / decay_steps)
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "warmup_cosine" else 1 - done
        return self.min_factor + (1 - self.min_factor) * left


@dataclass
class History:
    """The logged values of every step, and the weights after the last one.

    Attributes:
        val_losses: Losses of the validations, one after each `validates_every` steps.
        weights: Weights after the last step, or their average with `ema_decay`.
    """

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    val_losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(
    net: nn.Module, batches: list[Batch], recipe: Recipe, val: Batch, validates_every: int
) -> History:
    """Train `net` in place with one optimizer step per batch.

    Args:
        net: The model, tokens (B, T) -> logits (B, T, V), with a list `blocks`.
        batches: Batches of all steps. A target of -100 does not count.
        recipe: Options of the loss, the optimizer and the schedule.
        val: All samples of a validation.
        validates_every: Steps between two validations.
    """
    groups = []
    for name, p in net.named_parameters():
        kind = kind_of(name, p)
        lr = recipe.lrs.get(kind, recipe.lr)
        if name.startswith("blocks.0."):
            lr = recipe.lrs.get("first_block", lr)
        decay = recipe.weight_decay if p.ndim >= 2 else 0.0
        is_muon = recipe.momentum is not None and kind == "hidden"
        groups.append({"params": [p], "weight_decay": decay, "peak_lr": lr, "is_muon": is_muon})
    hidden = [group for group in groups if group["is_muon"]]
    momenta = [torch.zeros_like(group["params"][0]) for group in hidden]
    rest = [group for group in groups if not group["is_muon"]]
    adamw = torch.optim.AdamW(rest, betas=recipe.betas, eps=recipe.eps)
    vectors = [p for p in net.parameters() if p.ndim < 2]
    history = History()
    for step, batch in enumerate(batches):
        for group in groups:
            group["lr"] = recipe.factor_at(step) * group["peak_lr"]
        logits, targets = outputs(net, batch)  # (N, V), (N,)
        loss = F.cross_entropy(logits, targets, label_smoothing=recipe.label_smoothing)
        log_z = logits[targets != -100].logsumexp(dim=-1)
        loss = loss + recipe.z_loss * log_z.square().mean()
        loss = loss + recipe.penalty * sum(p.square().sum() for p in vectors)
        net.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), recipe.max_norm)
        adamw.step()
        for group, momentum in zip(hidden, momenta, strict=True):
            muon_step(group, momentum, recipe.momentum)
        weights = {name: p.detach().clone() for name, p in net.named_parameters()}
        if recipe.ema_decay is not None and step > 0:
            for name, mean in history.weights.items():
                weights[name] = mean.lerp(weights[name], 1 - recipe.ema_decay)
        history.weights = weights
        history.losses.append(loss.item())
        history.gradient_norms.append(norm.item())
        history.lrs.append(recipe.factor_at(step) * recipe.lr)
        if (step + 1) % validates_every == 0:
            validated = copy.deepcopy(net)
            validated.load_state_dict(weights, strict=False)  # a tied head has one of two names
            with torch.no_grad():
                history.val_losses.append(F.cross_entropy(*outputs(validated, val)).item())
    return history


def outputs(net: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits (N, V) and targets (N,). Each document is a sequence of its own."""
    tokens, targets, *documents = batch
    if not documents:
        return net(tokens).flatten(0, 1), targets.flatten()
    pieces = []
    for row, numbers in zip(tokens, documents[0], strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1]
        pieces += [net(piece[None])[0] for piece in row.split(lengths.tolist())]
    return torch.cat(pieces), targets.flatten()


def kind_of(name: str, p: Tensor) -> str:
    """Return the kind of a parameter by which Muon's learning rates differ."""
    if p.ndim < 2:
        return "vector"
    if name.startswith("blocks."):
        return "hidden"
    return "head" if name.startswith("head.") else "embedding"


@torch.no_grad()
def muon_step(group: dict, momentum: Tensor, beta: float) -> None:
    """Update a matrix in place by Muon, with the update's scale of Moonlight.

    Source: kellerjordan.github.io/posts/muon, arXiv:2502.16982.
    """
    (p,) = group["params"]
    momentum.lerp_(p.grad, 1 - beta)
    x = p.grad.lerp(momentum, beta)  # Nesterov
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.sub_(group["lr"] * 0.2 * math.sqrt(max(p.shape)) * x)
