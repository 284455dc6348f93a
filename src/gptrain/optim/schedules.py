"""Learning-rate schedules: pure functions of the optimizer step, 0 being the first.

Each returns the factor on the peak learning rate. It is start_factor at step 0 and rises in a
straight line to 1 at step == warmup_steps; a decay starts there and reaches min_factor at the last
step, total_steps - 1. Steps past the end hold min_factor. Where warm-up leaves no step to decay in,
the last step is already at min_factor.

Each names those of the four keywords that it reads; the others are not given to it, so that one
schedule can be changed for another by its name alone.
"""

import math


def warmup_cosine(
    step: int, *, warmup_steps: int, total_steps: int, start_factor: float, min_factor: float
) -> float:
    """Warm-up, then half a cosine from 1 to min_factor. Source: arXiv:1608.03983."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, start_factor)
    fraction = _fraction_done(step, warmup_steps, total_steps - 1)
    return min_factor + (1 - min_factor) * (1 + math.cos(math.pi * fraction)) / 2


def warmup_linear(
    step: int, *, warmup_steps: int, total_steps: int, start_factor: float, min_factor: float
) -> float:
    """Warm-up, then a straight line from 1 to min_factor."""
    if step < warmup_steps:
        return _warmup(step, warmup_steps, start_factor)
    return 1 - (1 - min_factor) * _fraction_done(step, warmup_steps, total_steps - 1)


def warmup_stable_decay(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    start_factor: float,
    min_factor: float,
    decay_steps: int,
) -> float:
    """Warm-up, 1, then a straight line to min_factor over the run's last decay_steps.

    A run can be made longer from any checkpoint before the decay. Source: arXiv:2405.18392, where
    a decay over a fifth of the run matches a cosine of the same length.
    """
    if step < warmup_steps:
        return _warmup(step, warmup_steps, start_factor)
    decay_start = max(warmup_steps, total_steps - 1 - decay_steps)
    return 1 - (1 - min_factor) * _fraction_done(step, decay_start, total_steps - 1)


def warmup_constant(step: int, *, warmup_steps: int, start_factor: float) -> float:
    """Warm-up, then 1 for ever."""
    return _warmup(step, warmup_steps, start_factor) if step < warmup_steps else 1.0


def constant(step: int) -> float:
    """1 at every step."""
    return 1.0


def _warmup(step: int, warmup_steps: int, start_factor: float) -> float:
    return start_factor + (1 - start_factor) * step / warmup_steps


def _fraction_done(step: int, start: int, end: int) -> float:
    """0 up to start, 1 from end on, a straight line between."""
    return 1.0 if step >= end else max(0, step - start) / max(1, end - start)
