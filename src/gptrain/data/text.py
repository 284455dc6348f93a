"""Prepared text as a data set."""

import os
from pathlib import Path

from gptrain.data.prepare import Paths, prepare_text
from gptrain.data.prepared import PreparedText
from gptrain.data.tokens import TokenDataset


class TextDataset(TokenDataset):
    """Windows of a token file that `prepare_text` made, whose manifest lies beside it.

    Args:
        file: `train_file` or `val_file` of a `PreparedText`.   seq_len: positions trained on.
        keep_tail: for validation, so that every byte of the text is predicted exactly once.

    Attributes:
        fingerprint: the same for the same text, tokenizer and split.
        tokenizer: what made the tokens.
        unigram_entropy: of the validation text, nats per byte.
    """

    def __init__(self, file: str | os.PathLike, seq_len: int, keep_tail: bool = False) -> None:
        prepared = PreparedText.load(Path(file).parent)
        super().__init__(
            file, seq_len, prepared.dtype, prepared.vocab_size, keep_tail, prepared.token_bytes
        )
        self.fingerprint = prepared.folder.name
        self.tokenizer = prepared.tokenizer()
        self.unigram_entropy = prepared.unigram_entropy

    @classmethod
    def from_corpus(
        cls,
        split: str,
        seq_len: int,
        path: Paths,
        tokenizer: str,
        cache_dir: str | os.PathLike,
        val_fraction: float = 0.05,
        pattern: str = "*",
        vocab_size: int | None = None,
    ) -> "TextDataset":
        """One part of a corpus, from the cache or prepared now; arguments as for `prepare_text`.

        Args:
            split: `train`, or `val`, which keeps its tail.
        """
        prepared = prepare_text(path, tokenizer, cache_dir, val_fraction, pattern, vocab_size)
        files = {"train": prepared.train_file, "val": prepared.val_file}
        if split not in files:
            raise ValueError(f"split={split}: must be one of {', '.join(files)}")
        return cls(files[split], seq_len, keep_tail=split == "val")
