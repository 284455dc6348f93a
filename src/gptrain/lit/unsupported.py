"""Callbacks of Lightning that would change without a word what is computed or what is resumed."""

from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as of_lightning

from gptrain.core.errors import ConfigError
from gptrain.lit.lightning import callbacks_of, strategy_of

# Class -> what to use instead.
REFUSED: dict[type[Callback], str] = {
    # These four change the steps or the schedule, which were computed before the run.
    of_lightning.BatchSizeFinder: "data.batch_size=<n>; python -m gptrain.plan proposes one",
    of_lightning.LearningRateFinder: "a sweep: python train.py -m optimizer.lr=1e-4,3e-4,1e-3",
    of_lightning.GradientAccumulationScheduler: "trainer.accumulate_grad_batches",
    of_lightning.StochasticWeightAveraging: "callbacks=ema",
    # Ranks do not average the gradients of layers that were frozen at the start.
    of_lightning.BaseFinetuning: "requires_grad_(False) in the net, and init_from=<run>",
    # Checkpoints do not contain its masked copies of weights.
    of_lightning.ModelPruning: "torch.nn.utils.prune on the net of gptrain.load(<run>)",
    # It cannot be restored from a checkpoint.
    of_lightning.SpikeDetection: "on_spike=skip",
    # No task of a run calls trainer.predict.
    of_lightning.BasePredictionWriter: "python -m gptrain.generate",
    # It averages the full net, of which each rank of some strategies holds a part.
    of_lightning.WeightAveraging: "strategy=single or strategy=ddp",
}


def check_supported(trainer: Trainer) -> None:
    """Raise a ConfigError if a callback is in REFUSED, also one that code of the user added.

    WeightAveraging is allowed if every rank holds the full net.
    """
    is_partitioned = strategy_of(trainer).parallel.is_partitioned
    for callback in callbacks_of(trainer):
        for kind, hint in REFUSED.items():
            is_refused = is_partitioned or kind is not of_lightning.WeightAveraging
            if isinstance(callback, kind) and is_refused:
                message = f"{kind.__name__} does not work in this run"
                raise ConfigError.of("callbacks", type(callback).__name__, message, hint=hint)
