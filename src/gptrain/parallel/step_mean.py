"""StepMean: the divisor that makes the loss of a step the mean over all targets of the step."""

# B batch, T time

import logging
import math

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.core import labels
from gptrain.loss import IGNORED, sum_dtype

log = logging.getLogger(__name__)
_OWN_TARGETS = "the mean over the targets it was given, then over micro-steps and ranks"


class StepMean:
    """Gives each loss of a step its divisor, before the backward pass, and averages the losses.

    Lightning and DDP average losses and gradients over micro-steps and data ranks. If each
    micro-batch divided by its own number of targets, the result would be a mean of means: it would
    depend on how the global batch is divided. The losses of batches whose targets gptrain's loader
    has counted are therefore divided by the same number:

        divisor = max(1, targets of the step on all data ranks) / (data ranks * micro-steps)

    Any other loss is the mean over the targets that it was given: if training_step or a hook
    changes the targets, the number of targets of the step is not known before its last micro-step.

    Args:
        group: Ranks that read different samples. None for a single rank.
        device: Device of the losses.

    Attributes:
        losses: Detached loss of each micro-batch of the step by its index, as Lightning has divided
            it by the number of micro-steps. `GPTStrategy.backward` fills it.
        counted: Targets of the current micro-batch, if gptrain's loader has counted them, and their
            `_version`, which torch increases when a tensor is changed in place. None for others.
            `GPTStrategy.batch_to_device` sets it.
        n_targets: Number of targets that the losses of the last step have counted, over all data
            ranks, a scalar tensor. NaN if a rank's training_step does not call
            `LanguageModel.loss`. `reduce` sets it.
        loss: Mean loss of the last step over all data ranks, a scalar tensor. NaN if there was no
            target, or if a rank has no loss. `reduce` sets it.
    """

    n_targets: Tensor
    loss: Tensor
    counted: tuple[Tensor, int] | None = None
    _has_explained = False

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self._group = group if group is not None and group.size() > 1 else None
        self._n_ranks = 1 if self._group is None else self._group.size()
        self._divisor = torch.ones((), dtype=sum_dtype(device), device=device)

    def begin_step(self, n_targets: int, n_micro_batches: int) -> None:
        """Begin a step: empty `losses`, and compute the divisor. Collective over the data ranks.

        Args:
            n_targets: Number of targets of the step on this rank, in all micro-batches. 0 if
                unknown: then none of them may be in `counted`.
            n_micro_batches: Number of micro-steps of the step.
        """
        total = self._all_reduce(torch.full_like(self._divisor, n_targets))
        self._divisor = total.clamp(min=1) / (self._n_ranks * n_micro_batches)
        self._n_targets: Tensor | None = None  # of this rank's losses in this step; None: no loss
        self.losses: dict[int, Tensor] = {}  # of each micro-batch, whose closure may run again

    def count_and_get_divisor(self, targets: Tensor) -> Tensor:
        """Count the targets of a loss of this step, and return the divisor of its sum, a scalar.

        It is that of the step for the targets in `counted`, if they are unchanged. For all others
        it is their own number, at least 1, and the first time a line is logged.
        """
        n_targets = (targets != IGNORED).sum()
        self._n_targets = n_targets if self._n_targets is None else self._n_targets + n_targets
        known, version = self.counted or (None, 0)
        if targets is known and targets._version == version:
            return self._divisor
        if not self._has_explained:
            self._has_explained = True
            log.info(labels.line("loss", _OWN_TARGETS))
        return n_targets.clamp(min=1)

    def reduce(self, n_micro_batches: int) -> None:
        """Set `n_targets` and `loss` after the last micro-step. Collective over the data ranks.

        `n_micro_batches` is the number of micro-steps by which Lightning has divided each loss.
        """
        unknown = torch.full_like(self._divisor, math.nan)
        n_targets = unknown if self._n_targets is None else self._n_targets.to(unknown)
        # Lightning has divided each loss by the number of micro-steps.
        kept = [*self.losses.values()]
        loss = torch.stack(kept).mean() * n_micro_batches if kept else unknown
        self.n_targets, losses = self._all_reduce(torch.stack((n_targets, loss.to(unknown))))
        self.loss = (losses / self._n_ranks).where(self.n_targets != 0, math.nan)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the data ranks. The tensor is changed in place."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)
        return tensor
