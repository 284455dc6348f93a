"""Callbacks of Lightning that would change without a word what is computed or what is resumed."""

from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as of_lightning

from gptrain.core.errors import ConfigError
from gptrain.lit.lightning import callbacks_of, strategy_of

# Class -> why a run cannot have the callback, and what to use instead.
REFUSED: dict[type[Callback], tuple[str, str]] = {
    of_lightning.BatchSizeFinder: (
        "changes the batch size after the steps of the run were counted",
        "data.batch_size=<n>, the largest that fits according to python -m gptrain.plan",
    ),
    of_lightning.LearningRateFinder: (
        "changes the learning rate for which the schedule was built",
        "a sweep, python train.py -m optimizer.lr=1e-4,3e-4,1e-3 trainer.max_steps=<few>",
    ),
    of_lightning.GradientAccumulationScheduler: (
        "changes the micro-batches per step after the steps of the run were counted",
        "trainer.accumulate_grad_batches, or data.global_batch_size",
    ),
    of_lightning.StochasticWeightAveraging: (
        "replaces the schedule, which a resumed run does not repeat",
        "callbacks=ema",
    ),
    of_lightning.BaseFinetuning: (
        "changes which layers are trained, which ranks and a resumed run do not see",
        "requires_grad_(False) in __init__ of the net, and init_from=<run> for the second phase",
    ),
    of_lightning.ModelPruning: (
        "replaces weights by masked copies that checkpoints do not contain",
        "torch.nn.utils.prune on the net of gptrain.load(<run>)",
    ),
    of_lightning.SpikeDetection: (
        "cannot be restored from a checkpoint",
        "on_spike=skip, or EarlyStopping with divergence_threshold",
    ),
    of_lightning.BasePredictionWriter: (
        "writes the results of trainer.predict, which no task of a run calls",
        "python -m gptrain.generate",
    ),
    of_lightning.OnExceptionCheckpoint: (
        "saves with all ranks, also if one rank fails alone",
        "checkpoint.every_n_steps=<n>",
    ),
    of_lightning.WeightAveraging: (
        "averages the full net, of which each rank holds a part",
        "strategy=ddp",
    ),
}


def check_supported(trainer: Trainer) -> None:
    """Check that no callback is in the table, also among those that code of the user has added.

    Args:
        trainer: Trainer of the run, with the callbacks of `configure_callbacks`.

    Raises:
        ConfigError: If a callback is in the table.
    """
    supported: list[type[Callback]] = []
    if trainer.world_size == 1:
        supported.append(of_lightning.OnExceptionCheckpoint)
    if not strategy_of(trainer).parallel.is_partitioned:
        supported.append(of_lightning.WeightAveraging)
    for callback in callbacks_of(trainer):
        for kind, (reason, hint) in REFUSED.items():
            if isinstance(callback, kind) and kind not in supported:
                name = type(callback).__name__
                raise ConfigError.of("callbacks", name, reason, hint=hint)
