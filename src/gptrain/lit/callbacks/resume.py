"""What a run needs, besides what Lightning saves and restores, to go on bit for bit."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import LambdaLR

from gptrain.checkpoints.rng import capture, restore
from gptrain.lit.callbacks.vote import gather
from gptrain.lit.lightning import clear_restarting_flags, finish_step, strategy_of

log = logging.getLogger(__name__)
STATE = ("global_step", "validated", "rng", "threads", "logged")  # of a checkpoint, for go_on


def add_state(
    trainer: Trainer, checkpoint: dict[str, Any], validated: bool, rng: dict[str, Any] | None
) -> None:
    """Puts into a checkpoint what a run needs to go on bit for bit, of all ranks.

    Args:
        validated: what is due after this step is done, see `loop_state_after`.
        rng: this rank's random numbers, where those of now are not the ones to go on with.
    """
    del checkpoint["loops"]  # counters in the middle of a hook; see `loop_state_after`
    checkpoint["validated"], checkpoint["rng"] = validated, gather(rng or capture())
    checkpoint["threads"] = torch.get_num_threads()
    checkpoint["logged"] = without_clocks(trainer)


def without_clocks(trainer: Trainer) -> dict[str, float]:
    """All that is logged, as far as it is alike in two runs alike."""
    metrics = trainer.callback_metrics.items()
    return {name: float(value) for name, value in metrics if not name.startswith("perf/")}


def put_back_logged(trainer: Trainer, state: dict[str, Any]) -> None:
    """Makes what the checkpoint's run had logged stand in `trainer.callback_metrics`."""
    logged = {n: torch.tensor(v, dtype=torch.float64) for n, v in state["logged"].items()}
    trainer.callback_metrics.update(logged)


def go_on(trainer: Trainer, state: dict[str, Any], changed: frozenset[str]) -> None:
    """Makes a run stand where the checkpoint's run stood; nothing random happens before a step.

    Args:
        state: STATE of the checkpoint.
        changed: options of the optimizer that take the value of today.
    """
    clear_restarting_flags(trainer)
    put_back_logged(trainer, state)
    finish_step(trainer, state["global_step"], state["validated"])
    said = [*apply_changes(trainer, changed), *follow_schedule(trainer, changed)]
    rng, threads, now = state["rng"], state["threads"], torch.get_num_threads()
    is_cpu = trainer.strategy.root_device.type == "cpu"
    n_saved = len(rng)
    if n_saved != trainer.world_size or (is_cpu and threads != now):
        said.append(
            f"resumed on {trainer.world_size} ranks of {now} threads what {n_saved} ranks of "
            f"{threads} threads saved: the same samples in every step; sums may differ in their "
            "last bits, and on another number of ranks dropout does"
        )
    for line in said if trainer.is_global_zero else ():
        log.warning("%s", line)
    if n_saved == trainer.world_size:
        restore(rng[trainer.global_rank])
    else:  # dropout of its own on every rank, those of a tensor group or a pipeline too
        restore(rng[0])
        torch.manual_seed(int(torch.randint(2**62, ())) + trainer.global_rank)


def apply_changes(trainer: Trainer, changed: frozenset[str]) -> list[str]:
    """Gives the optimizer the new value of each option that was allowed to change; says which."""
    said: dict[str, None] = {}  # groups have most options alike
    groups = trainer.optimizers[0].param_groups
    for group, fresh in zip(groups, strategy_of(trainer).fresh_options, strict=True):
        for key in changed & fresh.keys():
            name = "initial_lr" if key == "lr" and "initial_lr" in fresh else key
            before, now = group[name], fresh[name]
            if before != now:
                said[f"resumed with optimizer.{key}: {before} before, {now} now"] = None
                group[name] = now
                if name == "initial_lr":  # a schedule's peak; LambdaLR is followed below
                    group["lr"] *= now / before if before else 1.0
    return list(said)


def follow_schedule(trainer: Trainer, changed: frozenset[str]) -> Iterator[str]:
    """The next step's learning rate by the schedule of today; says where that is another."""
    for scheduled in trainer.lr_scheduler_configs:
        scheduler, groups = scheduled.scheduler, scheduled.scheduler.optimizer.param_groups
        if "lr" in changed and hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group["initial_lr"] for group in groups]
        if not isinstance(scheduler, LambdaLR):
            continue
        before = groups[0]["lr"]
        for group, base, factor in zip(
            groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)
        if not math.isclose(before, groups[0]["lr"], rel_tol=1e-6):
            yield (
                f"resumed with another schedule: after step {trainer.global_step} the learning "
                f"rate was to be {before:.3g} and is {groups[0]['lr']:.3g}; it follows the run's "
                "length unless scheduler.total_steps is set"
            )
