"""Learning-rate schedules: functions from the optimizer step to a factor on the peak learning rate.

The factor rises linearly from `start_factor` at step 0 to 1 at step `warmup_steps`. The decay, if
the schedule has one, reaches `min_factor` at the last step, `total_steps - 1`, or at the end of the
warm-up if that is later, and keeps it.

A schedule may have the keyword arguments `warmup_steps`, `total_steps`, `start_factor` and
`min_factor`. gptrain passes only those that the function has, so that a config can change to
another schedule by its name alone.
"""

import math


def warmup_cosine(
    step: int, *, warmup_steps: int, total_steps: int, start_factor: float, min_factor: float
) -> float:
    """Return the factor of a linear warm-up followed by half a cosine from 1 to `min_factor`.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983.

    Args:
        step: Optimizer step, counted from 0.
        warmup_steps: Number of steps of the warm-up. The factor is 1 at step `warmup_steps`.
        total_steps: Number of steps of the run.
        start_factor: Factor at step 0, if there is a warm-up.
        min_factor: Factor from step `total_steps - 1` on. If the warm-up ends only then or later,
            factor from its end on.
    """
    fraction = _fraction_done(step, warmup_steps, total_steps - 1)
    decay = min_factor + (1 - min_factor) * (1 + math.cos(math.pi * fraction)) / 2
    return _after_warmup(decay, step, warmup_steps, start_factor)


def warmup_linear(
    step: int, *, warmup_steps: int, total_steps: int, start_factor: float, min_factor: float
) -> float:
    """Return the factor of a linear warm-up followed by a linear decay from 1 to `min_factor`.

    The arguments are those of `warmup_cosine`.
    """
    decay = 1 - (1 - min_factor) * _fraction_done(step, warmup_steps, total_steps - 1)
    return _after_warmup(decay, step, warmup_steps, start_factor)


def warmup_stable_decay(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    start_factor: float,
    min_factor: float,
    decay_steps: int,
) -> float:
    """Return the factor of a linear warm-up, a phase at 1 and a linear decay to `min_factor`.

    A run can be continued with more steps from any checkpoint before the decay. Source: Hägele et
    al. 2024, arXiv:2405.18392, where a decay over a fifth of the run matches a cosine of the same
    length. The other arguments are those of `warmup_cosine`.

    Args:
        decay_steps: Number of steps of the decay, which ends at step `total_steps - 1`. A decay
            that would begin within the warm-up begins at its end.
    """
    decay_start = max(warmup_steps, total_steps - 1 - decay_steps)
    decay = 1 - (1 - min_factor) * _fraction_done(step, decay_start, total_steps - 1)
    return _after_warmup(decay, step, warmup_steps, start_factor)


def warmup_constant(step: int, *, warmup_steps: int, start_factor: float) -> float:
    """Return the factor of a linear warm-up followed by a constant phase at 1.

    The factor rises from `start_factor` at step 0 to 1 at step `warmup_steps`.
    """
    return _after_warmup(1.0, step, warmup_steps, start_factor)


def constant(step: int) -> float:
    """Return 1 for every step."""
    return 1.0


def _after_warmup(factor: float, step: int, warmup_steps: int, start_factor: float) -> float:
    """Return a line from `start_factor` to 1 within the warm-up, and `factor` from its end on."""
    if step < warmup_steps:
        return start_factor + (1 - start_factor) * step / warmup_steps
    return factor


def _fraction_done(step: int, start: int, end: int) -> float:
    """Return 0 up to step `start`, 1 from step `end` on, and a linear function in between."""
    return 1.0 if step >= end else max(0, step - start) / max(1, end - start)
