"""What a model learns from: dummy tokens, text, ready token files, and the order of samples.

The contract of a data set: `__len__`, and `__getitem__(i) -> (tokens, targets)`, both (T,) int64,
targets[t] = tokens[t + 1] and -100 where no loss is counted. Optional:

- `__getitems__(indices) -> (tokens, targets)`, both (B, T): a whole batch in one call.
- `token_bytes`, (V,) integers: bytes of text that each token stands for; opens bits per byte.
- `fingerprint`, a string: a resumed run must find the one that it began with.

Names are imported when asked for, so that reading a file's header costs no `import torch`.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "dummy": ("DummyTextDataset",),
    "tokens": ("TokenDataset", "TextDataset"),
    "token_files": ("find_token_files", "open_token_file", "count_windows"),
    "corpus": ("default_corpus",),
    "tokenizers": ("ByteTokenizer", "JsonTokenizer", "load_tokenizer", "train_bpe"),
    "prepare": ("PreparedText", "prepare_text"),
    "order": ("SampleOrder", "TrainBatches", "EvalBatches", "PaddedDataset", "collate"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["DataError", *_HOME]


class DataError(ValueError):
    """Data that is empty, damaged or does not fit; the message names the file and both sides."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
