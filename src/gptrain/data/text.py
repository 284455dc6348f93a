"""Prepared text as a data set."""

import os
from pathlib import Path

from gptrain.data.prepared import PreparedText
from gptrain.data.tokens import TokenDataset


class TextDataset(TokenDataset):
    """Windows of a token file that `prepare_text` made, whose manifest lies beside it.

    Args:
        file: `train_file` or `val_file` of a `PreparedText`.   seq_len: positions trained on.
        keep_tail: for validation, so that every byte of the text is predicted exactly once.
    """

    def __init__(self, file: str | os.PathLike, seq_len: int, keep_tail: bool = False) -> None:
        prepared = PreparedText.load(Path(file).parent)
        super().__init__(
            file, seq_len, prepared.dtype, prepared.vocab_size, keep_tail, prepared.token_bytes
        )
