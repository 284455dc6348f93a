"""The rule that skips or reports steps with a spike of the loss or of the gradient norm.

A step is a spike if its loss, or its gradient norm before clipping, is more than `sigma` standard
deviations above the mean of the last `window` steps. All finite values enter the window, also those
of spikes, so that a lasting change of the level is not a spike for longer than a window.
Source: SkipStepOptimizer of OLMo-core, https://github.com/allenai/OLMo-core.
"""

import math
from typing import Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from gptrain.checkpoints.status import SpikeError
from gptrain.lit.decisions import DecidedStep, StepRule
from gptrain.lit.strategies.base import LightningStrategy

NAMES = ("loss", "gradient norm")
# Relative standard deviation of equal values: rounding errors of float32 are not a spike.
ROUNDING = 1e-6


class SpikeRule(StepRule):
    """Rule that flags a step whose loss or gradient norm is far above that of the last steps.

    Nothing is flagged until half a window of steps is known. The loss is the mean over all targets
    of the step. It is summed in the same all-reduce as the number of targets, and the window stays
    on the device, so that the host never waits for the device. Ranks that read the same samples,
    such as those of a tensor-parallel group, average their losses by one more all-reduce. Therefore
    loss, norm and decision are identical on all ranks that take the step together.

    Args:
        reaction: "warn" logs a flagged step. "skip" logs it and leaves out its update.
        sigma: A step is flagged if it is more than this number of standard deviations above the
            mean.
        window: Number of steps before the current one whose mean and deviation are compared.
    """

    def __init__(self, reaction: Literal["warn", "skip"], sigma: float, window: int):
        self.reaction = reaction
        self.sigma = sigma
        self.window = window
        self._last: Tensor | None = None  # values, means and heights of the last step, (3, 2)

    def flag(self, strategy: LightningStrategy) -> Tensor:
        """Return 1 if the step is a spike, else 0, and add its loss and norm to the window.

        The result is a scalar tensor on the device, identical on all ranks that take the step
        together. All of these ranks must call this method, after `LightningStrategy.clip` has
        measured the norm.

        Args:
            strategy: Strategy of the run, with the loss and the gradient norm of the step.
        """
        norm = strategy.grad_norm
        loss = strategy.step_mean.loss
        dims = strategy.parallel.dims
        assert norm is not None  # `clip` has measured it
        if dims.data < dims.world_size:
            loss = loss / dims.world_size
            dist.all_reduce(loss)
        values = torch.stack((loss, norm.to(loss)))
        values = values.where(values.isfinite(), math.nan)  # NonFiniteRule handles such a step
        # Column s % (window + 1) has the values of step s, NaN if unknown. The column of this step
        # is not read, so that a step can be decided twice.
        shape = (len(NAMES), self.window + 1)
        if self.history is None or self.history.shape != shape:
            self.history = values.new_full(shape, math.nan)
        history = self.history = self.history.to(values)
        column = strategy.module.trainer.global_step % (self.window + 1)
        history[:, column] = math.nan
        n_known = history.isfinite().sum(dim=1)
        means = history.nansum(dim=1) / n_known
        deviations = ((history - means.unsqueeze(1)).square().nansum(dim=1) / n_known).sqrt()
        history[:, column] = values
        heights = (values - means) / deviations.maximum(ROUNDING * means.abs())
        self._last = torch.stack((values, means, heights))
        return ((heights > self.sigma) & (2 * n_known >= self.window)).any()

    def describe(self, trainer: Trainer, step: DecidedStep) -> SpikeError:
        """Return an error that names the loss or the norm, whichever is the higher spike.

        Args:
            trainer: Trainer of the run.
            step: Step that was flagged. It must be the step for which `flag` was called last.
        """
        assert self._last is not None  # set by `flag`
        heights = self._last[2].nan_to_num(0.0)
        highest = int(heights.argmax())
        value, mean, height = self._last[:, highest].tolist()
        return SpikeError(
            f"the {NAMES[highest]} at step {step.step} is {value:.4g}, {height:.1f} standard "
            f"deviations above the mean {mean:.4g} of the last {self.window} steps"
        )
