"""Builds the learning-rate schedule of a run."""

import inspect
from functools import partial
from typing import Any

import torch
from hydra.utils import get_method
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from gptrain.assemble.config_errors import as_config_errors
from gptrain.core.lengths import DEFAULT_DECAY, RunLengths, phase_steps, token_steps, warmup_steps
from gptrain.core.schema import RunConfig

# Keys of the scheduler group that gptrain reads. A schedule gets those that are in its signature.
OWN_KEYS = {
    f"{phase}_{unit}" for phase in ("warmup", "decay", "total") for unit in ("steps", "tokens")
}
OWN_KEYS |= {"start_factor", "min_factor"}


def configured_length(cfg: RunConfig, phase: str, step_tokens: int) -> float | None:
    """Return the length of a phase that the config asks for, in steps or as a fraction of the run.

    Args:
        cfg: Configuration of the run.
        phase: "warmup", "decay" or "total".
        step_tokens: Tokens of one optimizer step, over all ranks.

    Returns:
        The length, or None if the config gives no length for this phase.

    Raises:
        ConfigError: If the phase is given in tokens and is shorter than one step.
    """
    length = cfg.scheduler.phase(phase)
    if length.tokens is None:
        return length.steps
    with as_config_errors(cfg, f"scheduler.{phase}_tokens"):
        return token_steps(length.tokens, step_tokens)


def warmup_of(cfg: RunConfig, lengths: RunLengths) -> int:
    """Return the number of warm-up steps. A run that was resumed keeps those of its first start.

    Args:
        cfg: Configuration of the run.
        lengths: Lengths of the run, with the warm-up of the first start if the run was resumed.

    Raises:
        ConfigError: If the warm-up is a fraction of a run of unknown length.
    """
    if lengths.warmup_steps is not None:
        return lengths.warmup_steps
    length = configured_length(cfg, "warmup", lengths.step_tokens)
    total = configured_length(cfg, "total", lengths.step_tokens)
    with as_config_errors(cfg, "scheduler.warmup_steps"):
        return warmup_steps(length, int(total) if total else lengths.n_steps)


def build_schedule(
    cfg: RunConfig, lengths: RunLengths, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Build the learning-rate schedule, as the entry `lr_scheduler` of configure_optimizers.

    The target is a function of the step, or a scheduler class. It gets its own keys and those of
    warmup_steps, decay_steps, total_steps, start_factor and min_factor that are in its signature. A
    ReduceLROnPlateau watches `checkpoint.monitor` and is stepped after each validation.

    The dict has no key `interval`. LanguageModel adds `"interval": "step"`, which all of these
    schedules need. Lightning's default, `epoch`, steps them too rarely.

    Args:
        cfg: Configuration of the run.
        lengths: Lengths of the run, which replace lengths that the config does not give.
        optimizer: Optimizer whose learning rate is scheduled.

    Raises:
        ConfigError: If the length of a phase cannot be computed.
    """
    options, schedule = cfg.scheduler.arguments, get_method(cfg.scheduler.target)
    total = configured_length(cfg, "total", lengths.step_tokens)
    total_steps = int(total) if total else lengths.n_steps
    options["total_steps"] = total_steps
    options["warmup_steps"] = warmup_of(cfg, lengths)
    parameters = inspect.signature(schedule).parameters
    if "decay_steps" in parameters:
        decay = configured_length(cfg, "decay", lengths.step_tokens)
        decay = DEFAULT_DECAY if decay is None else decay
        with as_config_errors(cfg, "scheduler.decay_steps"):
            options["decay_steps"] = phase_steps(decay, total_steps)
    options = {k: v for k, v in options.items() if k in parameters or k not in OWN_KEYS}
    if not inspect.isclass(schedule):
        return {"scheduler": LambdaLR(optimizer, partial(schedule, **options))}
    if not issubclass(schedule, ReduceLROnPlateau):
        return {"scheduler": schedule(optimizer, **options)}
    options.setdefault("mode", cfg.checkpoint.mode)
    return {
        "scheduler": schedule(optimizer, **options),
        "monitor": cfg.checkpoint.monitor,
        "frequency": lengths.validate_every * lengths.batch.accumulate,
    }
