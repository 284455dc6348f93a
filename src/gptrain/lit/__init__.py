"""Objects for Lightning: module, datamodule, strategies, callbacks and loggers."""

from gptrain.lit.datamodule import TextDataModule
from gptrain.lit.module import LanguageModel

__all__ = ["LanguageModel", "TextDataModule"]
