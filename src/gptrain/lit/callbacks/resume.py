"""The state that an exact resume needs, and that Lightning does not save and restore itself."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import LambdaLR

from gptrain.checkpoints.rng import capture, restore
from gptrain.core.errors import ConfigIssue
from gptrain.lit.lightning import epoch_results, load_epoch_results, resume_schedules, strategy_of
from gptrain.parallel.mesh import gather

log = logging.getLogger(__name__)
STATE = ("rng", "dims", "logged", "frozen", "epoch_results")  # keys of add_state


def add_state(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Add the state that an exact resume needs to a checkpoint, and remove Lightning's counters.

    Adds the keys of STATE: `rng` (state of the random generators of each rank), `dims` (number of
    ranks along each axis), `logged` (result of `reproducible_metrics`), `frozen` (names of the
    parameters that are not trained) and `epoch_results` (that function's result on each rank). All
    ranks must call this function.
    """
    del checkpoint["loops"]  # depends on the hook in which the checkpoint is saved
    parameters = strategy_of(trainer).saved_parameters().items()
    frozen = [name for name, parameter in parameters if not parameter.requires_grad]
    own = capture(trainer.strategy.root_device), epoch_results(trainer), frozen
    checkpoint["rng"], checkpoint["epoch_results"], of_ranks = zip(*gather(own), strict=True)
    checkpoint["frozen"] = sorted({name for names in of_ranks for name in names})
    checkpoint["dims"] = vars(strategy_of(trainer).parallel.dims)
    checkpoint["logged"] = reproducible_metrics(trainer)


def reproducible_metrics(trainer: Trainer) -> dict[str, float]:
    """Return the values in `trainer.callback_metrics` by name, without those of time, perf/*."""
    metrics = trainer.callback_metrics.items()
    return {name: float(value) for name, value in metrics if not name.startswith("perf/")}


def warn_about_missing(expected: Mapping[str, str], metrics: Mapping[str, float]) -> None:
    """Log a warning for each config key that names a metric which was not logged.

    Args:
        expected: Config key -> logged name. A name that begins with perf/ is not checked, because
            `reproducible_metrics` leaves it out.
        metrics: Values that were logged, by name.
    """
    for key, name in expected.items():
        if name not in metrics and not name.startswith("perf/"):
            message = f"not logged in the first validation; allowed: {', '.join(sorted(metrics))}"
            log.warning("warning: %s", ConfigIssue(key, name, message))


def changed_options(now: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    """Return the names of the optimizer options that two configs, by dotted keys, set differently.

    "lr" stands for every option that gives a learning rate, and for what it is scaled with.
    """
    rates = ["_lr", "lr_scaling"]
    if now.get("optimizer.lr_scaling") != "none":
        rates.append("batch_size")
    keys = [key for key in now.keys() | saved.keys() if now.get(key) != saved.get(key)]
    return {"lr" if key.endswith(tuple(rates)) else key.rpartition(".")[2] for key in keys}


def resume_run(trainer: Trainer, state: dict[str, Any], changed: set[str]) -> None:
    """Restore what Lightning does not restore itself, before the first step of a resumed run.

    Restores frozen parameters, schedules and random generators, gives the optimizer the current
    values of changed options, and logs changes. All ranks must call it.

    Args:
        trainer: Trainer that has loaded the checkpoint.
        state: Entries of the checkpoint with the keys in STATE.
        changed: Result of `changed_options`. These options take their value from the current
            config, all others from the checkpoint.
    """
    for name, parameter in strategy_of(trainer).saved_parameters().items():
        parameter.requires_grad_(name not in state["frozen"])  # a callback may have frozen it
    resume_schedules(trainer)
    _apply_changes(trainer, changed)
    _follow_schedule(trainer)
    if getattr(strategy_of(trainer).parallel.options, "comm_hook", None) == "powersgd":
        log.warning("resumed: powersgd has lost its errors, and begins with full gradients again")
    rng, dims = state["rng"], vars(strategy_of(trainer).parallel.dims)
    if len(rng) == trainer.world_size and state["dims"] == dims:
        load_epoch_results(trainer, state["epoch_results"][trainer.global_rank])
        restore(rng[trainer.global_rank], trainer.strategy.root_device)
    else:
        effect = "steps have the same samples; dropout, last bits and means over this epoch differ"
        log.warning("resumed on ranks with other parts of the work: %s", effect)
        # Each rank needs its own dropout, also within a tensor-parallel group or a pipeline.
        restore(rng[0], trainer.strategy.root_device)
        torch.manual_seed(int(torch.randint(2**62, ())) + trainer.global_rank)


def _apply_changes(trainer: Trainer, changed: set[str]) -> None:
    """Give the optimizer the current values of changed options, and log them."""
    messages: dict[str, None] = {}  # parameter groups share most options: list a change once
    groups = trainer.optimizers[0].param_groups
    for group, fresh in zip(groups, strategy_of(trainer).fresh_options, strict=True):
        for key in changed & fresh.keys():
            name = "initial_lr" if key == "lr" and "initial_lr" in fresh else key
            before, now = group[name], fresh[name]
            if before != now:
                messages[f"resumed with optimizer.{key}: {before} before, {now} now"] = None
                group[name] = now
                # Scale the current rate with the peak rate. _follow_schedule recomputes a LambdaLR.
                if name == "initial_lr":
                    group["lr"] *= now / before if before else 1.0
    for message in messages:
        log.warning("%s", message)


def _follow_schedule(trainer: Trainer) -> None:
    """Compute the learning rates of the next step from the schedule of the current config."""
    for scheduled in trainer.lr_scheduler_configs:
        scheduler = scheduled.scheduler
        groups = scheduler.optimizer.param_groups
        # The options and the number of groups may be others. A SequentialLR consists of schedules.
        for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
            if hasattr(part, "base_lrs"):
                part.base_lrs = [group["initial_lr"] for group in groups]
        if not isinstance(scheduler, LambdaLR):
            continue
        before = groups[0]["lr"]
        rates = zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, base, factor in rates:
            group["lr"] = base * factor(scheduler.last_epoch)
        if not math.isclose(before, groups[0]["lr"], rel_tol=1e-6):
            step, now = trainer.global_step, groups[0]["lr"]
            change = f"the learning rate after step {step} is {now:.3g} instead of {before:.3g}"
            reason = "it follows the run's length unless scheduler.total_steps is set"
            log.warning("resumed with another schedule: %s; %s", change, reason)
