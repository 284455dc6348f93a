"""Lightning callbacks that gptrain does not support, with the reason and what to use instead."""

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

# Base class -> the strategies with which the callback works, and the reason why it does not work
# with other strategies. `{}` stands for the name of the run's strategy.
UNSUPPORTED: dict[type[Callback], tuple[tuple[str, ...], str]] = {
    BatchSizeFinder: (
        (),
        "changes the batch size, but the steps of the run are counted before it starts; "
        "try: data.batch_size=<n>, the largest that fits according to python -m gptrain.plan",
    ),
    LearningRateFinder: (
        (),
        "changes the learning rate for which the schedule of the run was built; "
        "try: a sweep, python train.py -m optimizer.lr=1e-4,3e-4,1e-3 trainer.max_steps=<few>",
    ),
    GradientAccumulationScheduler: (
        (),
        "changes the micro-batches per step, but the steps of the run are counted before it "
        "starts; try: trainer.accumulate_grad_batches, or data.global_batch_size",
    ),
    StochasticWeightAveraging: (
        (),
        "replaces the schedule at the start of an epoch, and a run that resumes within that epoch "
        "does not repeat this; try: lightning.pytorch.callbacks.WeightAveraging, or callbacks=ema",
    ),
    BaseFinetuning: (
        (),
        "layers that it has unfrozen are frozen again in a resumed run, and ranks do not average "
        "the gradients of layers that were frozen at the start; try: requires_grad_(False) in "
        "__init__ of the net or of the module, and init_from=<run> for the second phase",
    ),
    ModelPruning: (
        (),
        "replaces weights by masked copies that checkpoints do not contain, so that no run resumes "
        "exactly; try: torch.nn.utils.prune on the net of gptrain.load(<run>)",
    ),
    SpikeDetection: (
        (),
        "cannot be restored from a checkpoint, because it reads an attribute that it never sets; "
        "try: on_nonfinite=stop, or EarlyStopping with divergence_threshold",
    ),
    BasePredictionWriter: (
        (),
        "writes the results of trainer.predict, which no task of a run calls; "
        "try: python -m gptrain.generate",
    ),
    OnExceptionCheckpoint: (
        ("single",),
        "saves with all ranks, so that a rank that fails alone waits for the other ranks until "
        "strategy.timeout_s; strategies that work: single; try: checkpoint.every_n_steps=<n>",
    ),
    WeightAveraging: (
        ("single", "ddp"),
        "averages the full net at each step, which no rank holds under strategy={}; strategies "
        "that work: single, ddp",
    ),
}
LOG_THROUGH_A_LOGGER = (DeviceStatsMonitor, LearningRateMonitor, ThroughputMonitor)


def unsupported_reason(
    callback_class: type, strategy: str, has_logger: bool, has_progress_bar: bool
) -> str | None:
    """Return why a run cannot have a callback, or None if the run can have it.

    Args:
        callback_class: Class of the callback. Subclasses of an unsupported class are unsupported.
        strategy: Name of the run's strategy.
        has_logger: Whether the run has any logger.
        has_progress_bar: Whether trainer.enable_progress_bar is on.
    """
    for base, (strategies, reason) in UNSUPPORTED.items():
        if issubclass(callback_class, base) and strategy not in strategies:
            prefix = "" if callback_class is base else f"a {base.__name__}: "
            return prefix + reason.format(strategy)
    if issubclass(callback_class, LOG_THROUGH_A_LOGGER) and not has_logger:
        return "logs through a logger, but the run has no logger; try: logger=csv"
    if issubclass(callback_class, ProgressBar) and not has_progress_bar:
        return "is a progress bar, but progress bars are off; try: trainer.enable_progress_bar=true"
    return None


def find_second_progress_bar(classes: Iterable[tuple[str, type]]) -> tuple[str, str] | None:
    """Return an error if the config has two progress bars, of which Lightning shows only one.

    Args:
        classes: Config key and class of each callback.

    Returns:
        The config key of the second progress bar and the error message, or None if there is at most
        one.
    """
    bars = [key for key, callback_class in classes if issubclass(callback_class, ProgressBar)]
    if len(bars) < 2:
        return None
    return bars[1], f"a second progress bar after {bars[0]}; a run shows one progress bar"
