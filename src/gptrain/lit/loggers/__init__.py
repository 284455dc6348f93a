"""Curves of a run, in its own folder; a run that goes on goes on in the same ones.

Any logger of Lightning's works. One that also has `go_on_from(step)` is told, when training
begins, at which step, and forgets its points of that step and after it: they are logged again.
"""

from gptrain.lit.loggers.csv_file import CSVLogger
from gptrain.lit.loggers.tensorboard import TensorBoardLogger
from gptrain.lit.loggers.wandb_run import WandbLogger

__all__ = ["CSVLogger", "TensorBoardLogger", "WandbLogger"]
