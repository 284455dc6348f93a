"""Metrics as a user writes them."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torchmetrics import Metric


class Nats(Metric):
    """The sum of the cross entropies of all targets, as a metric."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits, targets):
        self.total += cross_entropy(logits, targets, reduction="sum")

    def compute(self):
        return self.total


class Counts(Metric):
    """A metric with several values: the number of targets, and with it the number of logits."""

    def __init__(self):
        super().__init__()
        self.add_state("n", torch.zeros(()), dist_reduce_fx="sum")
        self.width = 0.0

    def update(self, logits, targets):
        self.n += len(targets)
        self.width = float(logits.shape[1])

    def compute(self):
        return {"counted": self.n, "each": [self.n, self.width]}
