"""TextDataset: samples from a corpus of text, which is split and tokenized only once.

The tokens are cached in a folder whose name is a hash of the texts, the tokenizer and the options
of the split.
"""

import hashlib
import json
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptrain.core.errors import DataError
from gptrain.core.small_files import read_facts
from gptrain.data.corpus import Piece, Source, SourceScan, find_sources, read_pieces, scan_source
from gptrain.data.prepare import LENGTHS_TYPE, fresh_folder, write_tokens
from gptrain.data.token_files import open_token_file
from gptrain.data.tokenizers import FILE_NAME, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from gptrain.data.tokens import TokenDataset, token_dtype

log = logging.getLogger(__name__)

# Version of the folder's files and of the split, a part of the cache key. A change of either must
# increase it.
FORMAT = 5


class TextDataset(TokenDataset):
    """Dataset of the training or the validation text of a corpus; `from_corpus` builds it.

    The text is cut into windows of `seq_len` tokens. The validation set keeps the last, incomplete
    window, so that every byte counts.

    Args:
        folder: Folder that `from_corpus` has written. Its name is the fingerprint of the data.
        split: "train" or "val".
        seq_len: Positions of a sample, T.
        documents: `packed`, `separate` or `masked`. With `packed` and `masked`, windows cross the
            ends of documents. With `separate`, the first sample of a document begins at the
            document's first token, a longer document continues in the next sample, and the rest of
            its last sample is padding with targets -100. With `masked`, windows are as with
            `packed`, but a batch has a third item, the index of the document of each token, so that
            a document attends to itself only.
            With `separate` and `masked`, what a net computes for a document depends on this
            document only. The context of its first token is the first token of the file, which is
            the end token if there is one.

    Attributes:
        ends: Positions in the token file, (documents + 1,): where the first document begins, then
            where each document ends. If a text file is divided between the splits, each of its
            parts counts as a document.

    Raises:
        DataError: If the files of the folder are missing, damaged or links, or hold no window.
        ModuleNotFoundError: If the tokenizer needs the package `tokenizers`, which is missing.
    """

    def __init__(self, folder: Path, split: str, seq_len: int, documents: str = "packed") -> None:
        self.folder = folder
        self.documents = documents
        self._samples = None
        names = (FILE_NAME, f"{split}.bin", f"{split}.ends")
        try:
            if link := next((name for name in names if (folder / name).is_symlink()), None):
                raise DataError(f"{folder / link}: a link")
            self.tokenizer = load_tokenizer(folder)
            n_vocab = self.tokenizer.vocab_size
            file = open_token_file(folder / names[1], token_dtype(n_vocab))
            self.ends = np.fromfile(folder / names[2], LENGTHS_TYPE)
            if self.ends[-1:] != [file.n_tokens] or (np.diff(self.ends, prepend=0) < 0).any():
                raise DataError(f"{folder / names[2]}: does not match {split}.bin")
        except (DataError, FileNotFoundError) as error:
            raise DataError(f"{error}; delete {folder}, it will be prepared again") from None
        keep_tail = split == "val" or documents == "separate"
        super().__init__(file.path, seq_len, file.dtype, n_vocab, keep_tail)
        self.token_bytes = self.tokenizer.token_bytes
        # The first token of a file is the end token, if the corpus was prepared with end tokens.
        self.first_token = int(np.fromfile(file.path, file.dtype, 1)[0])
        has_end = self.first_token == self.tokenizer.end_id
        self.end_id = self.tokenizer.end_id if has_end else None
        self.fingerprint = folder.name
        if documents == "separate":
            n_samples = -(-np.diff(self.ends) // seq_len)
            self._samples = np.cumsum([0, *n_samples])  # (documents + 1,) first sample of each
            self._firsts = self._samples[[0, -1]]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens, targets and, with `masked`, documents, each (B, T) and int64.

        Args:
            indices: Numbers of windows, (B,).

        Raises:
            DataError: If a token id is not below the size of the vocabulary.
        """
        tokens, targets = super().__getitems__(indices)
        if self.documents != "masked":
            return tokens, targets
        # The token before a document's first token belongs to the document, as its context.
        windows = np.asarray(indices)[:, None]  # (B, 1)
        positions = windows * self.seq_len + np.arange(1, self.seq_len + 1)  # (B, T), targets
        documents = np.searchsorted(self.ends, positions, side="right") - 1
        tokens[torch.from_numpy(positions == self.ends[documents])] = self.first_token
        return tokens, targets, torch.from_numpy(documents)

    @classmethod
    def from_corpus(
        cls,
        split: str,
        seq_len: int,
        path: str | os.PathLike | Sequence[str | os.PathLike] | None,
        tokenizer: str,
        cache_dir: str | os.PathLike,
        val_fraction: float = 0.05,
        pattern: str = "*",
        vocab_size: int | None = None,
        format: str | None = None,
        text_key: str = "text",
        end_of_document: bool | None = None,
        documents: str = "packed",
    ) -> "TextDataset":
        """Return the dataset of one split of a corpus. Tokenize the corpus if it is not cached.

        The corpus is hashed if one of its files has changed. It is tokenized if the hash, the
        tokenizer or an option of the split has changed. Memory is constant, whatever the size of
        the corpus. Several processes may call this method at once; each gets the complete dataset.
        Text files that are not UTF-8 are left out with one warning for all of them.

        Args:
            split: "train" or "val".
            seq_len: Positions of a sample, T.
            path: File, folder, glob pattern or a list of these. A folder is read with all folders
                below it. None reads the source code of Python's standard library.
            tokenizer: `bytes`, `bpe` (trained on the training text), or the path of a
                tokenizer.json.
            cache_dir: Folder for the tokens and the index of the corpus.
            val_fraction: Fraction of the bytes of text files, and of the number of records, for
                validation.
            pattern: Pattern that the names of files within folders must match.
            vocab_size: Vocabulary size of the model. The tokenizer may not have more tokens. `bpe`
                learns this number of tokens, or fewer if the text is too small.
            format: Format of all files: text, jsonl, json or parquet. None takes the format of each
                file from its suffix, and from its content for .json.
            text_key: Key of the text in a record.
            end_of_document: Whether to append the end token to each document. None appends it if
                the tokenizer has one, except for `bytes`.
            documents: `packed` lets windows cross the ends of documents. `separate` begins each
                document with a new sample. `masked` packs documents that do not see each other.

        Raises:
            FileNotFoundError: If a path or the tokenizer does not exist.
            ModuleNotFoundError: If an optional package is missing.
            DataError: If there is too little text or none, if a file is damaged, if a record has no
                text, if the tokenizer has more tokens than the model or lacks a needed one, or if
                the cache was modified.
            ValueError: If `val_fraction` is not between 0 and 1, if the `vocab_size` of a new `bpe`
                is too small, or if a chat_template.jinja next to the tokenizer is not UTF-8.
            OSError: If a file cannot be read, or the disk is full or not writable. Incomplete files
                are removed.
        """
        cache_dir = Path(cache_dir).resolve()
        loaded = None
        has_end = end_of_document
        if tokenizer == "bpe":
            has_end = end_of_document is not False
            identity = f"bpe:{vocab_size}"
        else:
            loaded = load_tokenizer(tokenizer)
            identity = loaded.identity
            if vocab_size is not None and loaded.vocab_size > vocab_size:
                n_tokens = loaded.vocab_size
                raise DataError(f"tokenizer has {n_tokens} tokens, vocab_size={vocab_size}")
            if has_end is None:
                has_end = loaded.end_id is not None and not isinstance(loaded, ByteTokenizer)
            if has_end and loaded.end_id is None:
                raise DataError(f"tokenizer {tokenizer} has no token for the end of a document")
        sources = find_sources(path, pattern, format, cache_dir)
        sources, digest = _read_index(sources, cache_dir)
        key = [FORMAT, digest, identity, float(val_fraction), has_end]
        if any(source.format != "text" for source in sources):
            key.append(text_key)
        folder = cache_dir / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        if not folder.exists():
            pieces = partial(read_pieces, sources, val_fraction, text_key, not has_end)
            with fresh_folder(folder) as draft:
                _prepare(draft, sources, pieces, loaded, has_end, vocab_size)
        return cls(folder, split, seq_len, documents)

    def describe(self, n_samples: int = 0) -> str:
        """Return a line with the number of tokens and documents, and the epochs of a run.

        Args:
            n_samples: Number of samples that the run reads. 0 leaves out the epochs.
        """
        ends = "nothing between them"
        if self.end_id is not None:
            ends = f"each ended by {self.tokenizer.end_token}"
        words = [f"{len(self.ends) - 1:,} documents, {ends}, {self.documents}"]
        if self._samples is not None:
            counted = (self.ends[-1] - self.ends[0]) / (len(self) * self.seq_len)
            words.append(f"{counted:.0%} of the positions count")
        return " · ".join([super().describe(n_samples), *words])

    def _window_positions(self, number: int, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which positions of the file are read for some windows, and where each window ends.

        Args:
            number: Number of the file in `files`, always 0.
            windows: Numbers of windows, (b,).

        Returns:
            Positions (b, T+1) of the T tokens of each window and the target after the last one; and
            limits (b,): the end of the window's document with `separate`, otherwise the end of the
            file. Targets at or after a limit are -100.
        """
        if self._samples is None:
            return super()._window_positions(number, windows)
        document = np.searchsorted(self._samples, windows, side="right") - 1
        begins = windows == self._samples[document]
        first = self.ends[document] - 1 + (windows - self._samples[document]) * self.seq_len
        positions = first[:, None] + np.arange(self.seq_len + 1)
        # The token before a document is the last token of another document. Token 0 of the file,
        # the context of the first document, takes its place.
        positions[begins, 0] = 0
        return positions, self.ends[document + 1]


def _read_index(sources: list[Source], cache_dir: Path) -> tuple[list[Source], str]:
    """Return the files of a corpus that can be used, and the SHA-256 of their names and contents.

    A corpus must be read completely to be hashed. The result is therefore stored in the folder
    `index` of the cache and used again as long as names, sizes and modification times of the files
    are the same. Text files that are not UTF-8 are left out with one warning for all of them.

    Args:
        sources: Files of the corpus.
        cache_dir: Folder of the cache.

    Raises:
        DataError: If no file can be used, or if the index is a symbolic link.
        OSError: If a file of the corpus cannot be read, or the index cannot be written.
    """
    states = [(s.name, str(s.path), s.size_bytes, s.mtime_ns, s.format) for s in sources]
    key = hashlib.sha256(repr((FORMAT, states)).encode()).hexdigest()
    index_file = cache_dir / "index" / f"{key}.json"
    for path in (index_file.parent, index_file):
        if path.is_symlink():
            raise DataError(f"{path}: a link; delete it")
    index = read_facts(index_file)
    if index.keys() != {"sha256", "not_utf8"}:  # the file is missing, damaged or old
        index = _make_index(sources, [scan_source(source) for source in sources])
        index_file.parent.mkdir(parents=True, exist_ok=True)
        # Process ids are not unique across containers.
        draft = index_file.with_name(f".{uuid.uuid4().hex}")
        draft.write_text(json.dumps(index))
        draft.replace(index_file)
    left_out = dict(index["not_utf8"])
    texts = [source for number, source in enumerate(sources) if number not in left_out]
    if left_out:
        number, byte = index["not_utf8"][0]
        if not texts:
            message = f"byte {byte} is not UTF-8; none of {len(sources)} files is UTF-8 text"
            raise DataError(f"{sources[number].path}: {message}")
        verb = "is" if len(left_out) == 1 else "are"
        message = f"{len(left_out)} of {len(sources)} files {verb} not UTF-8 and {verb} left out"
        first = f"the first is {sources[number].name}, byte {byte}"
        warnings.warn(f"{message}: {first}", stacklevel=3)
    return texts, index["sha256"]


def _make_index(sources: list[Source], contents: list[SourceScan]) -> dict[str, Any]:
    """Return the content of the index file of a corpus: its hash, and the files that are left out.

    Args:
        sources: Files of the corpus.
        contents: Result of `scan_source` for each source.

    Returns:
        `sha256`: Hash of the names, formats and contents of the sources, without text files that
        are not UTF-8. `not_utf8`: For each of these files its number in `sources` and the position
        of its first bad byte.
    """
    pairs = list(zip(sources, contents, strict=True))
    text = [(s.name, s.format, content.sha256) for s, content in pairs if content.sha256]
    bad_bytes = enumerate(content.bad_byte for content in contents)
    not_utf8 = [(number, byte) for number, byte in bad_bytes if byte is not None]
    return {"sha256": hashlib.sha256(repr(text).encode()).hexdigest(), "not_utf8": not_utf8}


def _prepare(
    folder: Path,
    sources: list[Source],
    pieces: Callable[[], Iterator[Piece]],
    tokenizer: Tokenizer | None,
    has_end: bool,
    vocab_size: int | None,
) -> None:
    """Tokenize a corpus, and write the token files of both splits and the tokenizer to a folder.

    Args:
        folder: Empty folder.
        sources: Files of the corpus.
        pieces: Function that starts to read the text of the corpus from the beginning. It is called
            twice if a tokenizer is trained first.
        tokenizer: Tokenizer of the text. None trains a BPE tokenizer on the training text.
        has_end: Whether to append the end token to each document.
        vocab_size: Largest number of tokens of a new BPE tokenizer.

    Raises:
        DataError: If the training or the validation set would be empty, if a source is damaged or
            has changed since it was hashed, or if a character has no token.
        ValueError: If `vocab_size` is too small for a BPE tokenizer.
        ModuleNotFoundError: If an optional package is missing.
        OSError: If a file cannot be read or written.
    """
    n_bytes = sum(source.size_bytes for source in sources)
    log.info("preparing %.1f MB of text in %s, once", n_bytes / 1e6, folder.parent)
    if tokenizer is None:
        texts = (piece.text for piece in pieces() if not piece.is_val)
        tokenizer = train_bpe(texts, vocab_size or 0, folder / FILE_NAME, has_end)
    else:
        tokenizer.save(folder)
    end_id: Any = tokenizer.end_id if has_end else None
    if not all(write_tokens(folder, pieces(), tokenizer, end_id, n_bytes)):
        message = f"{n_bytes} bytes of text; too few to take a part of them for validation"
        raise DataError(f"{sources[0].path}: {message}")
    for source in sources:
        if source.path.stat().st_mtime_ns != source.mtime_ns:
            raise DataError(f"{source.path}: changed while it was read; start again")
