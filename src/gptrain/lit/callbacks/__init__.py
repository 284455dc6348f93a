"""Lightning callbacks for step metrics, the progress bar, checkpoints and sampled text."""

from gptrain.lit.callbacks.sample import SampleText

__all__ = ["SampleText"]
