"""Your training step: a loss and a metric of your own. What it inherits: gptrain/lit/module.py."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from gptrain.lit import LanguageModel


class MyModule(LanguageModel):
    """Rewards predictions that stay unsure (arXiv:1701.06548).   conf/module/my_module.yaml

    `val/loss` stays the plain cross entropy. A loss of the logits works under every strategy but
    pipelines, where no rank has the whole net; `self.loss(tokens, targets)` works under all.

    Args:
        entropy_weight: of the mean entropy of the predictions, which is subtracted from the loss.
    """

    def __init__(self, *args: Any, entropy_weight: float = 0.1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.entropy_weight = entropy_weight

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch  # (B, T), (B, T)
        log_p = self(tokens).log_softmax(-1)  # (B, T, V)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        self.log("train/entropy", entropy)
        return F.nll_loss(log_p.flatten(0, 1), targets.flatten()) - self.entropy_weight * entropy


class MyAccuracy(Metric):
    """The fraction of targets among the k likeliest tokens; `val/my_accuracy`."""

    hits: Tensor
    total: Tensor

    def __init__(self, k: int = 1):
        super().__init__()
        self.k = k
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")  # over all ranks
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        likeliest = logits.topk(self.k).indices  # (N, V) -> (N, k)
        self.hits += (likeliest == targets[:, None]).sum()
        self.total += targets.numel()

    def compute(self) -> Tensor:
        return self.hits / self.total
