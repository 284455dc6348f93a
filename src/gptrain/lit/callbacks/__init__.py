"""What happens around the steps: logging, progress, checkpoints, the end of the run."""

from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.finite import FiniteCheck
from gptrain.lit.callbacks.guarded import Guarded
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.callbacks.sample import SampleText
from gptrain.lit.callbacks.step_log import StepLog

__all__ = [
    "Checkpoints",
    "FiniteCheck",
    "Guarded",
    "ProgressBar",
    "SampleText",
    "StepLog",
]
