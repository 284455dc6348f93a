"""What happens around the steps: logging, progress, checkpoints, the end of the run."""

from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.callbacks.sample import SampleText
from gptrain.lit.callbacks.step_log import StepLog

__all__ = ["ProgressBar", "SampleText", "StepLog", "default_callbacks"]


def default_callbacks(cfg, lengths) -> list:
    """The callbacks that every run needs, whatever the `callbacks` group holds."""
    return [
        StepLog(cfg.trainer.log_every_n_steps, lengths.batch.global_batch_size, lengths.n_steps)
    ]
