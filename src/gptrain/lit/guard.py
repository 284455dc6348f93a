"""StepGuard: leaves out bad optimizer steps on the device, and reports them when the host reads.

A step is bad if a gradient is not finite (NaN or infinite), or if `on_spike=skip` and its loss or
its gradient norm is a spike. If the host read this before each update, the GPU would run out of
work once per step. Instead all counters stay on the device, and the optimizer itself leaves out its
update: the fused optimizers of torch and `gptrain.optim.Muon` read the flag from their attribute
`found_inf`. The host reads the counters when a step is logged or saved. From the step that ends the
run on, no later step changes a weight either. For any other optimizer the host reads each decision
at once.
"""

import logging
import math
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from gptrain.checkpoints.status import RefusedStepError
from gptrain.core.errors import DataError
from gptrain.core.precision import find_precision
from gptrain.lit.lightning import data_of, strategy_of
from gptrain.loss import NO_TARGET

log = logging.getLogger(__name__)
# Relative standard deviation of equal values: rounding errors of float32 are not a spike.
_ROUNDING = 1e-6
_KINDS = ("not finite", "a spike", "without a target")


@dataclass
class Spikes:
    """Window of the losses and gradient norms of the last steps, on the device.

    A value is a spike if it is more than `sigma` standard deviations above the mean of the last
    `window` steps. A standard deviation counts as at least a millionth of the mean. Nothing is a
    spike until half a window is known. All finite values enter the window, also those of spikes, so
    that a lasting change of the level is not a spike for longer than a window. Source:
    SkipStepOptimizer of OLMo-core, https://github.com/allenai/OLMo-core.

    Attributes:
        sigma: Number of standard deviations.
        window: Number of steps.
        history: Losses and norms, (2, window + 1): column s % (window + 1) has those of step s, NaN
            if unknown. None before the first step.
    """

    sigma: float
    window: int
    history: Tensor | None = None

    def flag(self, loss: Tensor, norm: Tensor, step: int) -> Tensor:
        """Return, as a bool scalar, whether loss or norm is a spike, and add both to the window.

        Both are scalar tensors, identical on all ranks. A value that is not finite is no spike, and
        does not enter the window. A second call for the same step replaces its values.
        """
        values = torch.stack((loss, norm.to(loss)))
        values = values.where(values.isfinite(), math.nan)
        shape = (2, self.window + 1)
        if self.history is None or self.history.shape != shape:
            self.history = values.new_full(shape, math.nan)
        history = self.history = self.history.to(values)
        column = step % (self.window + 1)
        history[:, column] = math.nan
        n_known = history.isfinite().sum(dim=1)
        means = history.nansum(dim=1) / n_known
        deviations = ((history - means.unsqueeze(1)).square().nansum(dim=1) / n_known).sqrt()
        history[:, column] = values
        heights = (values - means) / deviations.maximum(_ROUNDING * means.abs())
        return ((heights > self.sigma) & (2 * n_known >= self.window)).any()


@dataclass(eq=False)
class StepGuard:
    """Decides on the device whether the optimizer takes each step of a run.

    Attributes:
        on_nonfinite: "stop" ends the run at a step that is not finite, "skip" leaves it out. Under
            16-mixed both leave it out.
        on_spike: "warn" only reports spikes, "skip" leaves them out, "none" does not look for them.
        spikes: Window of losses and norms that tells what a spike is.
        max_skips: Number of consecutive steps that were left out after which the run ends.
    """

    on_nonfinite: Literal["stop", "skip"]
    on_spike: Literal["none", "warn", "skip"]
    spikes: Spikes
    max_skips: int

    def __post_init__(self) -> None:
        self._n_skipped = torch.tensor(0)  # steps that were refused in a row
        # Step -> whether it is of each kind in _KINDS and ends the run, since the last `read`.
        self._flags: dict[int, Tensor] = {}

    def start(self, trainer: Trainer) -> None:
        """Begin to decide about the steps of a training. Call it once, before the first step.

        Sets `decide_step` of the trainer's strategy, which calls it in each step.
        """
        self._trainer = trainer
        strategy = strategy_of(trainer)
        strategy.decide_step = self._decide
        self._n_skipped = self._n_skipped.to(strategy.root_device)
        self._has_ended = self._n_skipped < 0  # False
        # The loss scaler of 16-mixed sets found_inf itself, and the host waits for it in each step.
        # With FSDP's CPU offload the host waits for the gradients.
        self._is_scaled = find_precision(trainer.precision).autocast == "float16"
        waits = self._is_scaled or getattr(strategy.parallel.options, "cpu_offload", False)
        self._is_deferred = _skips_on_device(trainer.optimizers[0]) and not waits

    def _decide(self, optimizer: Optimizer) -> None:
        """Decide about the current step on all ranks, once the gradient norm was computed."""
        strategy = strategy_of(self._trainer)
        norm = cast(Tensor, strategy.grad_norm)  # `GPTStrategy.clip` has measured it
        step = self._trainer.global_step
        is_bad = ~norm.isfinite()
        is_spike = torch.zeros_like(is_bad)
        if self.on_spike != "none":
            loss, dims = strategy.step_mean.loss, strategy.parallel.dims
            if dims.data < dims.world_size:  # ranks that read the same samples average their loss
                loss = strategy.reduce(loss.clone())
            is_spike = self.spikes.flag(loss, norm, step)
        is_refused = is_bad | is_spike if self.on_spike == "skip" else is_bad
        self._n_skipped = (self._n_skipped + 1) * is_refused
        ends = self._n_skipped >= self.max_skips
        if self.on_nonfinite == "stop" and not self._is_scaled:
            ends = ends | is_bad
        self._has_ended |= ends
        has_no_target = strategy.step_mean.n_targets == 0
        self._flags[step] = torch.stack((is_bad, is_spike, has_no_target, ends))
        if self._is_deferred:
            cast(Any, optimizer).found_inf = (is_refused | self._has_ended).float()
            return
        self.read()
        # Optimizers leave out parameters without a gradient. A loss scaler finds NaN itself.
        if is_refused & ~is_bad if self._is_scaled else is_refused:
            optimizer.zero_grad(set_to_none=True)

    def read(self) -> None:
        """Report the steps that were decided since the last call, and end the run if it must end.

        Waits for the device. All ranks must call it at the same points, before a step is logged or
        saved. A warning names each step that is a spike, has no target, or is not finite (not under
        16-mixed).

        Raises:
            RefusedStepError: If a step ends the run. The weights are those before this step.
            DataError: If step 0 of the run has no target.
        """
        if not self._flags:
            return
        rows = torch.stack([*self._flags.values()]).tolist()
        for step, (is_bad, is_spike, has_no_target, ends) in zip(self._flags, rows, strict=True):
            if ends:
                raise self._error(step, is_spike=not is_bad)
            if has_no_target and step == 0:
                needed = "targets[t] = tokens[t + 1], and -100 only where no loss is counted"
                samples = self._samples(0)
                raise DataError(f"data.train: {NO_TARGET} in step 0{samples}; needed: {needed}")
            # A loss scaler skips steps as long as it seeks its scale, which is no news.
            for kind in compress(_KINDS, (is_bad and not self._is_scaled, is_spike, has_no_target)):
                log.warning("warning: step %d is %s%s", step, kind, self._samples(step))
        self._flags = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the refused steps in a row and the window of spikes, for a checkpoint."""
        return {"n_skipped": int(self._n_skipped), "history": self.spikes.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`, so that steps are decided as without a stop."""
        self._n_skipped = torch.tensor(state_dict["n_skipped"])
        self.spikes.history = state_dict["history"]

    def _error(self, step: int, is_spike: bool) -> RefusedStepError:
        """Return the error of a step that ends the run."""
        message = f"step {step} is {_KINDS[is_spike]}{self._samples(step)}"
        if is_spike or self._is_scaled or self.on_nonfinite == "skip":
            message += f"; {self.max_skips} steps in a row were skipped (max_skips)"
        if is_spike:
            return RefusedStepError(message, step, "spike")
        hint = "ckpt_path=last trainer.detect_anomaly=true, which names the operation"
        if self._is_scaled:
            hint = "trainer.precision=bf16-mixed, because the scaled gradients overflow fp16"
        return RefusedStepError(f"{message}; try: {hint}", step, "nonfinite")

    def _samples(self, step: int) -> str:
        """Return the samples of a step for a message, or "" if they are not known."""
        samples = data_of(self._trainer).step_samples(step)
        shown = ", ".join(map(str, samples[:16])) + (", …" if len(samples) > 16 else "")
        return f"; samples: {shown}" if samples else ""


def _skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer, as torch's fused ones, skips its update if `found_inf` is 1."""
    names = ("_step_supports_amp_scaling", "skips_on_device")
    can_skip = any(getattr(optimizer, name, False) for name in names)
    return can_skip and all(group.get("fused", True) for group in optimizer.param_groups)
