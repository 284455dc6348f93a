"""Checks for training steps and evaluations in which every target is -100, so none counts."""

import logging
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

from gptrain.core.errors import DataError
from gptrain.core.labels import shorten
from gptrain.lit.lightning import data_of
from gptrain.loss import NO_TARGET

log = logging.getLogger(__name__)


class MissingTargets:
    """Reports optimizer steps in which every target is -100, so that nothing was trained.

    This is an error in step 0 of the run, and a warning in a later step.

    Attributes:
        n_steps: Number of optimizer steps without a target, in this start of the run.
        is_last: Whether the last step had no target. Such a step has no loss, and train/loss keeps
            the value of the step before, because 0 would look like success.
    """

    def __init__(self) -> None:
        self.n_steps = 0
        self.is_last = False

    def check_step(self, trainer: Trainer, step: int, n_targets: float) -> None:
        """Check that a step had at least one target on any data-parallel rank.

        The result is stored in `is_last`. A step without a target is an error only if it is step 0.
        Later ones are counted in `n_steps`, and rank 0 logs a warning for the first of them.

        Args:
            trainer: Trainer of the run.
            step: Number of the step, counted from 0.
            n_targets: Number of targets of the step, over all ranks. NaN if training_step computes
                its loss without gptrain's loss functions, which counts as a step with targets.

        Raises:
            DataError: If step 0 of the run has no target.
        """
        self.is_last = n_targets == 0
        if not self.is_last:
            return
        message = f"data.train: {NO_TARGET} in step {step}"
        if samples := data_of(trainer).step_samples(step):
            message += f"; samples: {shorten(samples)}"
        if step == 0:
            needed = "needed: targets[t] = tokens[t + 1], and -100 only where no loss is counted"
            raise DataError(f"{message}; {needed}")
        self.n_steps += 1
        if self.n_steps == 1 and trainer.is_global_zero:
            further = "further steps without a target are counted and not logged"
            log.warning("warning: %s; %s", message, further)


def check_evaluated(trainer: Trainer) -> None:
    """Check that the batches of an evaluation had at least one target that is not -100.

    `TrainingMonitor` calls it if the module's own validation_step or test_step has not called
    `LanguageModel.evaluate`, which checks this itself. A batch in which targets cannot be counted,
    because it is neither a pair nor a dict with integer targets or labels, counts as a batch with a
    target. Does nothing if the loader does not count targets, as the loader of a user's
    LightningDataModule. All ranks must call it.

    Args:
        trainer: Trainer whose validation or test has ended.

    Raises:
        DataError: On all ranks, if all targets of the evaluation were -100.
    """
    loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    counts: Sequence[int | None] = getattr(loader, "step_targets", ())
    n_targets = sum(1 if count is None else count for count in counts)
    total = torch.tensor(n_targets, dtype=torch.float32, device=trainer.strategy.root_device)
    if counts and float(trainer.strategy.reduce(total, reduce_op="sum")) == 0:
        raise DataError(f"data.{'test' if trainer.testing else 'val'}: {NO_TARGET}")
