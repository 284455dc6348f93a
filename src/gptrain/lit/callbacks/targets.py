"""Steps and evaluations in which no target counts, because all are -100."""

import logging
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer

from gptrain.checkpoints.status import shorten
from gptrain.core.small_files import DataError
from gptrain.lit.lightning import data_of, strategy_of

log = logging.getLogger(__name__)
NO_TARGET = "no target counts, all are -100"


class MissingTargets:
    """Refuses a first step without any target, and counts later ones.

    Attributes:
        n_steps: Optimizer steps of this start that had no target.
        is_last: Whether the last step was one of them. It has no loss: train/loss keeps the value
            of the step before, because 0 would look like success.
    """

    def __init__(self) -> None:
        self.n_steps, self.is_last = 0, False

    def check_step(self, trainer: Trainer) -> None:
        """Look at the targets that the losses of a step have counted, over all data ranks.

        Raises:
            DataError: If the very first step of the run has none.
        """
        n_targets = strategy_of(trainer).step_mean.n_targets
        self.is_last = n_targets is not None and float(n_targets) == 0
        if not self.is_last:
            return
        step = trainer.global_step
        samples = shorten(data_of(trainer).step_samples(step))
        if step == 0:
            needed = "needed: targets[t] = tokens[t + 1], and -100 only where no loss is counted"
            raise DataError(f"data.train: {NO_TARGET} in step 0; samples: {samples}; {needed}")
        self.n_steps += 1
        if self.n_steps == 1 and trainer.is_global_zero:
            where = f"step {step}; samples: {samples}"
            said = "warning: data.train: %s in %s; steps like it are counted"
            log.warning(said, NO_TARGET, where)


def check_evaluated(trainer: Trainer) -> None:
    """Check that an evaluation by a step of the user's own has read a target.

    Nothing is known of batches that are neither a pair nor a dict with integer targets or labels.
    All ranks must call it.

    Raises:
        DataError: On all ranks, if all targets were -100.
    """
    loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    counts: Sequence[int | None] = getattr(loader, "step_targets", ())
    n_known = sum(1 if count is None else count for count in counts)
    total = torch.tensor(n_known, dtype=torch.float32, device=trainer.strategy.root_device)
    if counts and float(trainer.strategy.reduce(total, reduce_op="sum")) == 0:
        raise DataError(f"data.{'test' if trainer.testing else 'val'}: {NO_TARGET}")
