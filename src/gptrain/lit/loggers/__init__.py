"""Curves of a run, in its own folder; a run that goes on goes on in the same ones.

Any logger of Lightning's works. One that also has `go_on_from(step)` is told, when training
begins, at which step, and forgets its points after it: they are logged again. One that has
`log_note(name, text, step)` is told samples of text and why the run ended.
"""

from gptrain.lit.loggers.csv import CSVLogger
from gptrain.lit.loggers.tensorboard import TensorBoardLogger
from gptrain.lit.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "TensorBoardLogger", "WandbLogger"]
