"""The rule that skips or reports steps with a spike of the loss or of the gradient norm.

A step is a spike if its loss, or its gradient norm before clipping, is more than `sigma` standard
deviations above the mean of the last `window` steps. The values of all steps enter the window, also
those of spikes, so that a lasting change of the level is not a spike for longer than a window.
Source: SkipStepOptimizer of OLMo-core, https://github.com/allenai/OLMo-core.
"""

import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from gptrain.checkpoints.status import SpikeError
from gptrain.lit.decisions import DecidedStep
from gptrain.lit.strategies.base import LightningStrategy

log = logging.getLogger(__name__)
NAMES = ("loss", "gradient norm")
# Relative standard deviation of equal values: rounding errors of float32 are not a spike.
ROUNDING = 1e-6


class SpikeRule:
    """Flags a step that is a spike, from the second half of the first window on.

    The loss is the mean over all targets of the step on all ranks. It is summed in the same
    all-reduce as the number of targets, and the window stays on the device: the rule never waits on
    the host. Ranks of a tensor group or a pipeline have the same samples and average their losses
    by one more all-reduce. Loss and norm, and so the decision, are identical on all ranks.

    Args:
        on_spike: "warn" logs the step. "skip" skips it, too.
        sigma: Number of standard deviations above the mean.
        window: Number of steps of the mean.
        max_skips: Number of consecutive skipped steps after which the run ends.
    """

    def __init__(self, on_spike: str, sigma: float, window: int, max_skips: int):
        self.refuses = on_spike == "skip"
        self.sigma = sigma
        self.window = window
        self.max_skips = max_skips
        self.n_skipped = 0  # number of consecutive skipped steps
        # Values of step s in column s % (window + 1), NaN if unknown. Shape (2, window + 1). The
        # column of the step that is decided is not read, so that a step can be decided twice.
        self.history: Tensor | None = None
        self._last: Tensor | None = None  # values, mean and deviation of the last step, (3, 2)

    def flag(self, strategy: LightningStrategy) -> Tensor:
        """Return 1 if the step is a spike, else 0, and add its loss and norm to the window.

        The result is a scalar tensor on the device, identical on all ranks that take the step
        together. All of these ranks must call this method, after `LightningStrategy.clip` has
        measured the norm.

        Args:
            strategy: Strategy of the run, with `shares_loss` set.
        """
        norm, step_mean = strategy.grad_norm, strategy.step_mean
        assert norm is not None and step_mean.loss is not None  # `clip` has measured both
        loss, dims = step_mean.loss, strategy.parallel.dims
        if dims.data < dims.world_size:
            loss = loss / dims.world_size
            dist.all_reduce(loss)
        values = torch.stack((loss, norm.to(loss)))
        if self.history is None:
            self.history = values.new_full((len(NAMES), self.window + 1), math.nan)
        history = self.history = self.history.to(values)
        column = strategy.module.trainer.global_step % (self.window + 1)
        history[:, column] = math.nan
        n_known = history.isfinite().sum(dim=1)
        mean = history.nansum(dim=1) / n_known
        deviation = ((history - mean.unsqueeze(1)).square().nansum(dim=1) / n_known).sqrt()
        is_finite = values.isfinite()
        history[:, column] = values.where(is_finite, math.nan)
        self._last = torch.stack((values, mean, deviation))
        limit = mean + self.sigma * deviation.maximum(ROUNDING * mean.abs())
        return ((values > limit) & is_finite & (2 * n_known >= self.window)).any()

    def report(self, trainer: Trainer, step: DecidedStep, is_flagged: bool) -> Exception | None:
        """Log a spike. Return a SpikeError if the run ends.

        Args:
            trainer: Trainer of the run.
            step: Step that was decided.
            is_flagged: Result of `flag` for this step. If False, nothing is logged, and the count
                of consecutive skipped steps starts again at 0.
        """
        if not is_flagged:
            self.n_skipped = 0
            return None
        assert self._last is not None  # set by `flag`
        heights = [
            (value - mean) / max(deviation, ROUNDING * abs(mean), 1e-30)
            for value, mean, deviation in self._last.T.tolist()
        ]
        highest = max(range(len(NAMES)), key=heights.__getitem__)
        value, mean, _ = self._last[:, highest].tolist()
        message = (
            f"the {NAMES[highest]} at step {step.step} is {value:.4g}, {heights[highest]:.1f} "
            f"standard deviations above the mean {mean:.4g} of the last {self.window} steps"
        )
        if self.refuses:
            self.n_skipped += 1
            if self.n_skipped == self.max_skips:
                reason = f"{self.n_skipped} steps in a row were skipped (max_skips)"
                return SpikeError(f"{message}; {reason}")
            message += "; the step is skipped"
        if trainer.is_global_zero:
            log.warning("warning: %s", message)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the window and the number of consecutive skipped steps, for a checkpoint.

        A resumed run then decides every step as a run that was not interrupted.
        """
        return {"history": self.history, "n_skipped": self.n_skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the window of a checkpoint.

        Args:
            state: Dict that the method `state_dict` returned. It is ignored if its window has
                another length.
        """
        history = state["history"]
        if history is not None and history.shape == (len(NAMES), self.window + 1):
            self.history = history.clone()
            self.n_skipped = state["n_skipped"]
