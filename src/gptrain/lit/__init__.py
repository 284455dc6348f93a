"""The only room that knows Lightning: module, data module, strategies, callbacks."""

from gptrain.lit.datamodule import TextDataModule
from gptrain.lit.module import LanguageModel

__all__ = ["LanguageModel", "TextDataModule"]
