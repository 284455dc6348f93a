"""What happens around the steps: logging, progress, checkpoints, the end of the run."""

from gptrain.lit.callbacks.sample import SampleText

__all__ = ["SampleText"]
