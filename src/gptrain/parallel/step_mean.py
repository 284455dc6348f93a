"""One number by which all losses of an optimizer step are divided, so that they add up to its mean.

Losses and gradients are averaged over micro-steps and data ranks. Were each a mean over its own
targets, and these unevenly missing, the result would be a mean of means, and depend on how a batch
is divided.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.loss import IGNORED


class StepMean:
    """Divides each sum of losses of a step by the step's targets per micro-batch and data rank.

    The count is that of the batches as they were loaded. Where training_step gives the loss other
    targets, what is left to multiply loss and gradients by is known after the last micro-step:
    `correction`, exactly 1 otherwise.

    Args:
        group: the data ranks; None: there is one.

    Attributes:
        n_targets: Targets that the losses of the last step have counted, over all data ranks. None
            before the first step, or if training_step computes its loss in another way.
    """

    n_targets: Tensor | None = None

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.group = group if group is not None and group.size() > 1 else None
        dtype = torch.float32 if device.type == "mps" else torch.float64  # it has no other
        self.divisor = torch.ones((), dtype=dtype, device=device)
        self._sums = torch.zeros(2, dtype=dtype, device=device)  # of divisors, of targets
        self._has_loss = False  # whether the step has counted targets, be they 0

    def announce(self, n_targets: int, n_micro_batches: int) -> None:
        """Before a step: this rank's targets in all its micro-batches. All data ranks call it."""
        n_ranks = 1 if self.group is None else self.group.size()
        total = self._all_reduce(torch.full_like(self.divisor, n_targets))
        self.divisor = total.clamp(min=1) / (n_ranks * n_micro_batches)

    def begin(self) -> None:
        """Before the first micro-step."""
        self._sums = torch.zeros_like(self._sums)
        self._has_loss = False

    def divisor_of(self, targets: Tensor) -> Tensor:
        """What the sum of the losses of these targets is to be divided by."""
        self._has_loss = True
        self._sums = self._sums + torch.stack((self.divisor, (targets != IGNORED).sum()))
        return self.divisor

    def correction(self) -> Tensor:
        """Return the factor for loss and gradients that corrects targets changed in training_step.

        All data ranks must call it.
        """
        divisors, targets = self._all_reduce(self._sums)
        self.n_targets = targets if self._has_loss else None
        return (divisors / targets).where(targets > 0, 1.0)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor
