"""Lightning's callbacks that a run cannot have, with the reason and what to type instead."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelPruning,
    OnExceptionCheckpoint,
    ProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)

# Class -> the strategies under which it works, and why it does not work under the others.
REFUSED: dict[type[Callback], tuple[tuple[str, ...], str]] = {
    BatchSizeFinder: (
        (),
        "tries batch sizes while the run's steps are counted before it starts; "
        "try: data.batch_size=<n>, the largest one that python -m gptrain.plan says will fit",
    ),
    LearningRateFinder: (
        (),
        "changes the learning rate that the schedule of the run has been built for; "
        "try: a sweep, python train.py -m optimizer.lr=1e-4,3e-4,1e-3 trainer.max_steps=<few>",
    ),
    GradientAccumulationScheduler: (
        (),
        "changes the steps of a run while it goes on, which are counted before it starts; "
        "try: trainer.accumulate_grad_batches, or data.global_batch_size",
    ),
    StochasticWeightAveraging: (
        (),
        "takes the schedule over at an epoch's start, which no resume within an epoch repeats; "
        "try: lightning.pytorch.callbacks.WeightAveraging, or callbacks=ema",
    ),
    BaseFinetuning: (
        (),
        "a resumed run leaves frozen what it had unfrozen, and ranks do not average the gradients "
        "of what was frozen at the start; try: requires_grad_(False) in __init__ of the net or "
        "of the module, and init_from=<run> for the second phase",
    ),
    ModelPruning: (
        (),
        "replaces weights by masked copies that checkpoints do not hold, so that no resume is "
        "exact; try: torch.nn.utils.prune on the net of gptrain.load(<run>)",
    ),
    SpikeDetection: (
        (),
        "cannot be restored from a checkpoint (Lightning reads an attribute that it does not set); "
        "try: on_nonfinite=stop, or EarlyStopping with divergence_threshold",
    ),
    BasePredictionWriter: (
        (),
        "writes the results of trainer.predict, which no task of a run calls; "
        "try: python -m gptrain.generate",
    ),
    OnExceptionCheckpoint: (
        ("single",),
        "saves with all ranks, and a rank that fails alone would wait for the others until "
        "strategy.timeout_s; strategies that work: single; try: checkpoint.every_n_steps=<n>",
    ),
    WeightAveraging: (
        ("single", "ddp"),
        "averages the one whole net of each step, which no rank has under strategy={}; strategies "
        "that work: single, ddp",
    ),
}
LOG_THROUGH_A_LOGGER = (DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor)


def refusal(kind: type, strategy: str, has_logger: bool, has_bar: bool) -> str | None:
    """Return why a run cannot have a callback of a class, or None if it can.

    Args:
        kind: The class; a subclass of a refused one is refused as well.
        strategy: Name of the run's strategy.
        has_logger: Whether the run has any logger.
        has_bar: Whether trainer.enable_progress_bar is on.
    """
    for refused, (strategies, reason) in REFUSED.items():
        if issubclass(kind, refused) and strategy not in strategies:
            return (
                f"{'' if kind is refused else f'a {refused.__name__}: '}{reason.format(strategy)}"
            )
    if issubclass(kind, LOG_THROUGH_A_LOGGER) and not has_logger:
        return "logs through a logger, and this run has none; try: logger=csv"
    if issubclass(kind, ProgressBar) and not has_bar:
        return "a progress bar; try: trainer.enable_progress_bar=true"
    return None


def second_of_a_kind(kinds: Iterable[tuple[str, type]]) -> tuple[str, str] | None:
    """Return the key of the second progress bar among callbacks and what is wrong with it.

    Args:
        kinds: Key in the config and class of each callback.
    """
    bars = [key for key, kind in kinds if issubclass(kind, ProgressBar)]
    return (bars[1], f"a second progress bar besides {bars[0]}; one is shown") if bars[1:] else None
