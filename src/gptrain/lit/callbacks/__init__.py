"""Lightning callbacks of every run: step metrics, progress bar, checkpoints, sampled text."""

from gptrain.lit.callbacks.sample import SampleText

__all__ = ["SampleText"]
