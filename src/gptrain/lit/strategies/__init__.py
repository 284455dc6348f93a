"""Lightning's side of each strategy; the work itself is done by gptrain.parallel."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import DDPStrategy, Strategy


def make_strategy(options, machine, split) -> Strategy | str:
    """The strategy that the `strategy` group describes."""
    if machine.world_size == 1:
        return "auto"
    return DDPStrategy(timeout=timedelta(seconds=options.timeout_s))
