"""Tells the loggers where a run goes on."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

from gptrain.lit.module import LanguageModel


class Curves(Callback):
    """Has each logger with a `go_on_from` forget this step and what came after, and log it again.

    What the checkpoint knows of its own step is certain. What the loggers hold of it is not: a
    validation may have been logged by a process that died before it saved that.
    """

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        here = trainer.global_step
        known = {name: value for name, (step, value) in module.logged.items() if step == here}
        validation = {name: known.pop(name) for name in list(known) if name.startswith("val/")}
        for logger in trainer.loggers:
            if hasattr(logger, "go_on_from"):
                logger.go_on_from(here)
                for row in filter(None, (known, validation)):
                    logger.log_metrics(row, step=here)
