"""Your training step: a loss and a metric of your own. Base class: gptrain/lit/module.py."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from gptrain.lit import LanguageModel


class MyModule(LanguageModel):
    """Language model with a confidence penalty. Config: conf/module/my_module.yaml.

    The training loss is the cross entropy minus the weighted mean entropy of the predictions
    (Pereyra et al. 2017, arXiv:1701.06548). `val/loss` is still the cross entropy alone.

    This loss uses the logits, `self(tokens)`. It works under every strategy except pipelines, where
    no rank has the full net. `self.loss(tokens, targets)` works under every strategy.

    Args:
        *args: Arguments of `LanguageModel`.
        entropy_weight: Weight of the entropy.
        **kwargs: Keyword arguments of `LanguageModel`.
    """

    def __init__(self, *args: Any, entropy_weight: float = 0.1, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.entropy_weight = entropy_weight

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the loss of a batch and log the entropy.

        Args:
            batch: Tokens (B, T), targets (B, T) and, with `data.documents=masked`, documents (B,
                T).
            batch_idx: Index of the micro-batch in the epoch, not used.
        """
        tokens, targets, *documents = batch  # (B, T) each; documents only if they are masked
        log_p = self(tokens, *documents).log_softmax(-1)  # (B, T, V)
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        self.log("train/entropy", entropy)
        return F.nll_loss(log_p.flatten(0, 1), targets.flatten()) - self.entropy_weight * entropy


class MyAccuracy(Metric):
    """Fraction of the targets that are among the k most probable tokens, `val/my_accuracy`.

    Args:
        k: Number of tokens.
    """

    hits: Tensor
    total: Tensor

    def __init__(self, k: int = 1):
        super().__init__()
        self.k = k
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")  # sum over all ranks
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count the targets and the hits among them.

        Args:
            logits: Logits of the positions whose target counts, (N, V).
            targets: Targets of these positions, (N,).
        """
        likeliest = logits.topk(self.k).indices  # (N, V) -> (N, k)
        self.hits += (likeliest == targets[:, None]).sum()
        self.total += targets.numel()

    def compute(self) -> Tensor:
        """Return the fraction of hits."""
        return self.hits / self.total
