"""What a model learns from: dummy tokens, text, ready token files, and the order of samples.

The contract of a data set: `__len__`, and `__getitem__(i) -> (tokens, targets)`, both (T,) int64,
targets[t] = tokens[t + 1] and -100 where no loss is counted. Optional:

- `__getitems__(indices) -> (tokens, targets)`, both (B, T): a whole batch in one call.
- `token_bytes`, (V,) integers: bytes of text that each token stands for; opens bits per byte.

Names are resolved when asked for, so that reading a file's header costs no `import torch`.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "DataError": "errors",
    "DummyTextDataset": "dummy",
    "TextDataset": "text",
    "TokenDataset": "tokens",
    "SampleOrder": "order",
    "TrainBatches": "order",
    "EvalBatches": "order",
    "PaddedDataset": "order",
    "collate": "order",
    "TokenFile": "token_files",
    "find_token_files": "token_files",
    "open_token_file": "token_files",
    "count_windows": "token_files",
    "ByteTokenizer": "tokenizers",
    "JsonTokenizer": "tokenizers",
    "load_tokenizer": "tokenizers",
    "train_bpe": "tokenizers",
    "PreparedText": "prepared",
    "prepare_text": "prepare",
    "default_corpus": "corpus",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
