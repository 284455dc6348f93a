"""The decision whether each optimizer step is taken, made on the device without waiting for it.

A step is refused if a `StepRule` flags it, for example because a gradient is not finite. If the
host read the flag before the optimizer's update, the GPU would run out of work once per step.
Instead, the flag stays on the device, and the optimizer itself skips its update: the fused
optimizers of torch and `gptrain.optim.Muon` read the flag from their attribute `found_inf`, which
torch's GradScaler sets, too (see `skips_on_device`). The host reads the flag later, at a moment
that is the same on all ranks:

    decide    after the gradient norm: ask the rules, give the flag to the optimizer, start a copy
              of the flag to the host, and conclude the step before
    conclude  read the flag and report a refused step: in `decide` of the next step, or earlier
              where the outcome matters: before a log line, a save, a validation or the end of an
              epoch

When the report of step N ends the run, the host may have begun step N + 1, which has changed no
parameter. The counter of the steps and the schedule are then set back to step N.

Other optimizers update without asking `found_inf`. Their steps are concluded at once, which costs
one synchronization with the device per step.

To add a rule, write a subclass of `StepRule`, and add an object of it to the list in `build_rules`
(`gptrain/assemble/callbacks.py`). A rule that needs the values of earlier steps keeps them in its
attribute `history`, which `flag` updates without reading it on the host.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from gptrain.checkpoints.status import RefusedStepError
from gptrain.core.precision import find_precision
from gptrain.lit.callbacks.targets import MissingTargets
from gptrain.lit.lightning import forget_last_step, strategy_of
from gptrain.lit.strategies.base import LightningStrategy
from gptrain.parallel.state import options_of
from gptrain.runtime.measure import HostCopy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecidedStep:
    """An optimizer step that was decided on the device, while the host may not know the decision.

    It keeps everything that a later report about the step needs, because the next step may have
    begun by then.

    Attributes:
        step: Number of the step, counted from 0.
        values: Copy to the host of the flag of each rule, followed by the number of targets.
        micro_steps: Arguments, keyword arguments and random generator states of training_step, for
            each micro-step of the step.
        micro_losses: Loss of each micro-step, detached and divided by the number of micro-steps.
        options: Options of each parameter group in this step, such as the learning rate.
        schedules: State of each learning rate schedule in this step.
    """

    step: int
    values: HostCopy
    micro_steps: list[tuple[Any, Any, dict[str, Any]]]
    micro_losses: list[Tensor]
    options: list[dict[str, Any]]
    schedules: list[dict[str, Any]]


class StepRule:
    """Base class of the rules that refuse or report optimizer steps.

    A rule flags a step on the device, and later describes a flagged step on the host.

    Attributes:
        reaction: Effect on a flagged step: "warn" logs a warning, "skip" also leaves out the
            optimizer's update, "stop" leaves out the update and ends the run.
        logs_skips: Whether each skipped step is logged. If not, skipped steps are reported only
            when `max_skips` of them in a row end the run.
        history: Tensor on the device with the values of earlier steps on which `flag` depends.
            Checkpoints contain it. None if `flag` depends on the current step only.
    """

    reaction: Literal["warn", "skip", "stop"]
    logs_skips = True
    history: Tensor | None = None

    @property
    def refuses(self) -> bool:
        """Whether the optimizer must leave out the update of a flagged step."""
        return self.reaction != "warn"

    def flag(self, strategy: LightningStrategy) -> Tensor:
        """Return 1 if the rule flags the step, else 0, as a scalar tensor on the device.

        A subclass must override this method. `flag` must not read values of the device on the host.
        The result must be identical on all ranks that take the step together, as functions of
        `strategy.grad_norm` are. `flag` is called once for each call of `LightningStrategy.clip`.

        Args:
            strategy: Strategy of the run, with the loss and the gradient norm of the step.
        """
        raise NotImplementedError

    def describe(self, trainer: Trainer, step: DecidedStep) -> RefusedStepError:
        """Return an error that describes a flagged step.

        A subclass must override this method. If the run ends because of the step, the caller raises
        the error; otherwise it logs the message. All ranks that take the step together call this
        method at the same point, so that it may use collective operations.

        Args:
            trainer: Trainer of the run.
            step: Step that was flagged.
        """
        raise NotImplementedError


class StepDecisions:
    """Decides by a list of rules whether each optimizer step of a run is taken.

    Args:
        rules: Rules of the run. Their reports about a step are made in this order.
        max_skips: Number of consecutive skipped steps after which the run ends.

    Attributes:
        n_skipped: Number of consecutive steps that were skipped, up to the last step whose decision
            the host has read.
        is_deferred: Whether the optimizer itself skips refused steps on the device, so that the
            host reads the decision one step later.
    """

    def __init__(self, rules: Sequence[StepRule], max_skips: int):
        self.rules = rules
        self.max_skips = max_skips
        self.n_skipped = 0
        self._pending: DecidedStep | None = None

    def start(self, trainer: Trainer, missing_targets: MissingTargets) -> None:
        """Make the strategy call `decide` and `conclude` in the steps of a training that begins.

        Also sets `is_deferred`. The methods `decide` and `conclude` need this call.

        Args:
            trainer: Trainer that fits, whose optimizer exists.
            missing_targets: Check of the number of targets, which is called for each step.
        """
        self.trainer = trainer
        self.missing_targets = missing_targets
        strategy = strategy_of(trainer)
        strategy.decide_step = self.decide
        strategy.conclude_step = self.conclude
        optimizer = trainer.optimizers[0]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # The loss scaler of 16-mixed sets found_inf itself. FSDP's CPU offload has to wait for the
        # gradients anyway.
        self.is_deferred = (
            skips_on_device(optimizer)
            and not find_precision(trainer.precision).has_loss_scaler
            and all(parameter.device == strategy.root_device for parameter in parameters)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: steps skipped in a row, and the rules' `history`."""
        histories = {type(rule).__name__: rule.history for rule in self.rules}
        return {"n_skipped": self.n_skipped, "histories": histories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, so that steps are decided as in a run without a stop.

        A rule that the checkpoint does not have begins without a `history`.

        Args:
            state: Dict that the method `state_dict` returned.
        """
        self.n_skipped = state["n_skipped"]
        for rule in self.rules:
            rule.history = state["histories"].get(type(rule).__name__)

    def decide(self, optimizer: Optimizer) -> None:
        """Decide whether the optimizer takes the step whose gradients are complete.

        First the decision about the step before is read and reported, if it was not before
        (`conclude`). The decision about this step stays on the device until the next step, unless
        the optimizer cannot skip an update there. All ranks that take the step together must call
        this method, after the gradient norm was computed and before the optimizer's update.

        Args:
            optimizer: Optimizer of the run. It skips the update of a refused step, either by its
                attribute `found_inf` or because its gradients are removed here.

        Raises:
            RefusedStepError: If a decision that was read here has refused its step, and the run
                ends because of it. This is the decision about the step before, or about this step
                if it does not stay on the device.
            DataError: If a decision that was read here is about step 0 of the run, and step 0 has
                no target.
        """
        trainer = self.trainer
        strategy = strategy_of(trainer)
        if self._pending is not None and self._pending.step < trainer.global_step:
            self.conclude()
        flags = [rule.flag(strategy).float() for rule in self.rules]
        refusals = [flag for rule, flag in zip(self.rules, flags, strict=True) if rule.refuses]
        self._pending = DecidedStep(
            trainer.global_step,
            HostCopy([*flags, strategy.step_mean.n_targets.float()]),
            strategy.micro_steps,
            strategy.micro_losses,
            [options_of(group) for group in optimizer.param_groups],
            [scheduled.scheduler.state_dict() for scheduled in trainer.lr_scheduler_configs],
        )
        if self.is_deferred:
            cast(Any, optimizer).found_inf = torch.stack(refusals).amax() if refusals else None
        elif self.conclude():
            optimizer.zero_grad(set_to_none=True)  # optimizers skip parameters without a gradient

    def conclude(self) -> bool:
        """Read the last decision on the host, report it, and return whether the step was refused.

        Waits until the device has made the decision, updates `n_skipped`, and logs a step that was
        flagged. Returns False at once if there is no decision that was not read yet. All ranks that
        take the step together must call this method at the same points.

        Raises:
            RefusedStepError: If the step was refused and the run ends because of it. The counter of
                the steps and the schedules then have their values from before the step.
            DataError: If this is step 0 of the run and it has no target.
        """
        step = self._pending
        if step is None:
            return False
        self._pending = None
        *flags, n_targets = step.values.read()
        self.missing_targets.check_step(self.trainer, step.step, n_targets)
        flagged = [rule for rule, flag in zip(self.rules, flags, strict=True) if flag == 1]
        is_skipped = any(rule.reaction != "warn" for rule in flagged)
        n_skipped = self.n_skipped + 1 if is_skipped else 0
        for rule in flagged:
            self._report(rule, step, n_skipped)
        self.n_skipped = n_skipped  # unchanged if the step ends the run: a resumed run repeats it
        return any(rule.refuses for rule in flagged)

    def _report(self, rule: StepRule, step: DecidedStep, n_skipped: int) -> None:
        """Log a flagged step on one rank, or end the run because of it.

        Does nothing for a skipped step if the rule's `logs_skips` is False and the run continues.
        All ranks that take the step together must call this method.

        Args:
            rule: Rule that has flagged the step.
            step: Step that was flagged.
            n_skipped: Number of consecutive skipped steps, including this one.

        Raises:
            RefusedStepError: If the rule's reaction is "stop", or if `max_skips` steps in a row
                were skipped. The step is then no longer counted in `trainer.global_step`.
        """
        is_skipped = rule.reaction == "skip"
        is_limit = is_skipped and n_skipped >= self.max_skips
        if is_skipped and not rule.logs_skips and not is_limit:
            return
        error = rule.describe(self.trainer, step)
        if is_limit:
            error.why = f"; {n_skipped} steps in a row were skipped (max_skips)"
        if rule.reaction == "stop" or error.why:
            self._go_back_to(step)
            raise error
        if self.trainer.is_global_zero:
            log.error("warning: %s%s", error, "; the step is skipped" if is_skipped else "")

    def _go_back_to(self, step: DecidedStep) -> None:
        """Undo what Lightning did after a refused step, as if the step had not been taken.

        The step counter, the options of the optimizer and the schedules are set back to their
        values in this step, because Lightning has counted the step although its update was left
        out. Does nothing if Lightning has not counted the step yet.

        Args:
            step: Step that was refused.
        """
        if self.trainer.global_step == step.step:
            return
        forget_last_step(self.trainer)
        groups = self.trainer.optimizers[0].param_groups
        for group, options in zip(groups, step.options, strict=True):
            group.update(options)
        for scheduled, state in zip(self.trainer.lr_scheduler_configs, step.schedules, strict=True):
            scheduled.scheduler.load_state_dict(state)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether an optimizer skips its update on the device if its `found_inf` is 1.

    torch's fused optimizers do this, and so does any optimizer with a true attribute
    `skips_on_device`. The result is False if a parameter group has a false option `fused`.

    Args:
        optimizer: Optimizer of the run.
    """
    names = ("_step_supports_amp_scaling", "skips_on_device")
    can_skip = any(getattr(optimizer, name, False) for name in names)
    return can_skip and all(group.get("fused", True) for group in optimizer.param_groups)
