"""Loggers that write into the run folder, and continue the same curves when a run resumes.

Every Lightning logger works. gptrain calls two more methods if a logger has them:

- `discard_after(step)`, at the start of training, with the number of optimizer steps done. A
  resumed run repeats the steps after its checkpoint, so the logger removes their points.
- `log_note(name, text, step)`, with sampled text and with the reason why the run ended. `step` is
  the number of optimizer steps done.
"""

from gptrain.lit.loggers.csv import CSVLogger
from gptrain.lit.loggers.json_lines import JsonLinesLogger
from gptrain.lit.loggers.tensorboard import TensorBoardLogger
from gptrain.lit.loggers.wandb import WandbLogger

__all__ = ["CSVLogger", "JsonLinesLogger", "TensorBoardLogger", "WandbLogger"]
