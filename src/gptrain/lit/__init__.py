"""Lightning's side: module, data module, strategies, callbacks, loggers."""

from gptrain.lit.datamodule import TextDataModule
from gptrain.lit.module import LanguageModel

__all__ = ["LanguageModel", "TextDataModule"]
