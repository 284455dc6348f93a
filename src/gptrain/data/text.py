"""Text as a data set: split and tokenized once, and cached by the hash of all that went in."""

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

from gptrain.core.small_files import DataError, read_facts
from gptrain.data.corpus import Piece, Source, SourceScan, find_sources, read_pieces, scan_source
from gptrain.data.prepare import LENGTHS_TYPE, fresh_folder, write_tokens
from gptrain.data.token_files import open_token_file
from gptrain.data.tokenizers import FILE_NAME, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from gptrain.data.tokens import TokenDataset, token_dtype

log = logging.getLogger(__name__)

FORMAT = 5  # of the folder and of the split; another one is another place in the cache


class TextDataset(TokenDataset):
    """Windows of one part of a tokenized text; `val` keeps its tail, so that every byte counts.

    Args:
        folder: as `from_corpus` writes it; its name is the fingerprint.   split: train or val.
        documents: `packed`: windows run on over the ends of documents. `separate`: the first
            sample of a document begins with it, a long one goes on in the next sample, and the
            rest of its last sample is padded with targets -100: what a net computes of a document
            depends on that document alone.
    Attributes:
        ends: (documents + 1,) where the first one begins and each one ends, in tokens; a file of
            which a section is in the other part counts as several.
    Raises: DataError for a folder that is not what was written.
    """

    def __init__(self, folder: Path, split: str, seq_len: int, documents: str = "packed") -> None:
        self.folder, self.documents, self._samples = folder, documents, None
        names = (FILE_NAME, f"{split}.bin", f"{split}.ends")
        try:
            if link := next((name for name in names if (folder / name).is_symlink()), None):
                raise DataError(f"{folder / link}: a link")
            self.tokenizer = load_tokenizer(folder)
            n_vocab = self.tokenizer.vocab_size
            file = open_token_file(folder / names[1], token_dtype(n_vocab))
            self.ends = np.fromfile(folder / names[2], LENGTHS_TYPE)
            if self.ends[-1:] != [file.n_tokens] or (np.diff(self.ends, prepend=0) < 0).any():
                raise DataError(f"{folder / names[2]}: not of the {file.n_tokens} tokens beside it")
        except (DataError, FileNotFoundError) as error:
            raise DataError(f"{error}; delete {folder}, it is prepared again") from None
        keep_tail = split == "val" or documents == "separate"
        super().__init__(file.path, seq_len, file.dtype, n_vocab, keep_tail)
        self.token_bytes, self.fingerprint = self.tokenizer.token_bytes, folder.name
        if documents == "separate":
            n_samples = -(-np.diff(self.ends) // seq_len)
            self._samples = np.cumsum([0, *n_samples])  # (documents + 1,) first one of each
            self._firsts = self._samples[[0, -1]]

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
        on_bad_record: str = "error",
        end_of_document: bool | None = None,
        documents: str = "packed",
    ) -> "TextDataset":
        """One part of a corpus, from the cache or tokenized now.

        The corpus is hashed when one of its files has changed, tokenized when the hash, the
        tokenizer or the split has. Memory is constant. Processes that do this at once end alike.
        Text files that are not UTF-8 are left out, with one warning for all of them. Records
        without text are an error or, by `on_bad_record="skip"`, left out with one warning.

        Args:
            path: a file, a folder with all below it, a glob, a list of them; None: the standard
                library's source.   pattern: that names of files within folders must match.
            tokenizer: `bytes`, `bpe` (trained on the train part), or a tokenizer.json.
            vocab_size: of the model: as many tokens are learned for `bpe` if the text gives them;
                no tokenizer may have more.
            format: of all files: text, jsonl, json or parquet; None: by their suffixes.
            end_of_document: a token after each; None: where the tokenizer has one, but not `bytes`.
        Raises: FileNotFoundError; DataError for no text, or a cache that somebody has changed;
            OSError if the disk is full or not to be written to, with nothing left behind.
        """
        cache_dir, ready, has_end = Path(cache_dir).resolve(), None, end_of_document
        if tokenizer == "bpe":
            has_end = end_of_document is not False
            identity = f"bpe:{vocab_size}"
        else:
            ready = load_tokenizer(tokenizer)
            identity = ready.identity
            if vocab_size is not None and ready.vocab_size > vocab_size:
                raise DataError(f"tokenizer has {ready.vocab_size} tokens, vocab_size={vocab_size}")
            if has_end is None:
                has_end = ready.end_id is not None and not isinstance(ready, ByteTokenizer)
            if has_end and ready.end_id is None:
                raise DataError(f"tokenizer {tokenizer} has no token for the end of a document")
        sources = find_sources(path, pattern, format, cache_dir)
        sources, digest = _read_index(sources, cache_dir, text_key)
        key = [FORMAT, digest, identity, float(val_fraction), has_end]
        if any(source.format != "text" for source in sources):
            key += [text_key, on_bad_record]
        folder = cache_dir / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        if not folder.exists():
            bad_records = None if on_bad_record == "error" else []
            pieces = partial(read_pieces, sources, val_fraction, text_key, not has_end, bad_records)
            with fresh_folder(folder) as draft:
                _prepare(draft, sources, pieces, ready, has_end, vocab_size)
            if bad_records:
                said = f"{len(set(bad_records))} records left out: the first is {bad_records[0]}"
                warnings.warn(said, stacklevel=2)
        return cls(folder, split, seq_len, documents)

    def describe(self, n_samples: int = 0) -> str:
        """What the samples are made of, and how often a run of so many sees them."""
        ends = "nothing between them"
        if np.fromfile(self.files[0].path, self.files[0].dtype, 1) == self.tokenizer.end_id:
            ends = f"each ended by {self.tokenizer.end_token}"
        words = [f"{len(self.ends) - 1:,} documents, {ends}, {self.documents}"]
        if self._samples is not None:
            counted = (self.ends[-1] - self.ends[0]) / (len(self) * self.seq_len)
            words.append(f"{counted:.0%} of the positions count")
        return " · ".join([super().describe(n_samples), *words])

    def _window_positions(self, number: int, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._samples is None:
            return super()._window_positions(number, windows)
        document = np.searchsorted(self._samples, windows, side="right") - 1
        begins = windows == self._samples[document]
        first = self.ends[document] - 1 + (windows - self._samples[document]) * self.seq_len
        places = first[:, None] + np.arange(self.seq_len + 1)
        places[begins, 0] = 0  # the context, and not the end of the document before
        return places, self.ends[document + 1]


def _read_index(sources: list[Source], cache_dir: Path, text_key: str) -> tuple[list[Source], str]:
    """Return the sources that are text, and the SHA-256 over their names and contents.

    Hashing a corpus means reading all of it. The result is therefore kept in `index/` and used
    again while the names, sizes and time stamps of the files stay the same. Text files that are not
    UTF-8 are left out, with one warning for all of them.

    Raises:
        DataError: If no source is text, or the index is a link.
    """
    states = [(s.name, str(s.path), s.size_bytes, s.mtime_ns, s.format, text_key) for s in sources]
    key = hashlib.sha256(repr((FORMAT, states)).encode()).hexdigest()
    known = cache_dir / "index" / f"{key}.json"
    for path in (known.parent, known):
        if path.is_symlink():
            raise DataError(f"{path}: a link; delete it")
    index = read_facts(known)
    if index.keys() != {"sha256", "not_utf8"}:  # missing, damaged, or of an older version
        index = _make_index(sources, [scan_source(source, text_key) for source in sources])
        known.parent.mkdir(parents=True, exist_ok=True)
        draft = known.with_name(f".{uuid.uuid4().hex}")  # process ids repeat in containers
        draft.write_text(json.dumps(index))
        draft.replace(known)
    left_out = dict(index["not_utf8"])
    texts = [source for number, source in enumerate(sources) if number not in left_out]
    if left_out:
        number, byte = index["not_utf8"][0]
        if not texts:
            message = f"no UTF-8 text in {len(sources)} files, here byte {byte}"
            raise DataError(f"{sources[number].path}: {message}")
        message = f"{len(left_out)} of {len(sources)} files are not UTF-8 and are left out"
        first = f"the first is {sources[number].name}, byte {byte}"
        warnings.warn(f"{message}: {first}", stacklevel=3)
    return texts, index["sha256"]


def _make_index(sources: list[Source], contents: list[SourceScan]) -> dict[str, Any]:
    """Return the content of an index file.

    Returns:
        `sha256`, the hash of the sources that are text, and `not_utf8`, pairs of the number of each
        other source and the position of its first byte that is not UTF-8.
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
    """Writes the token files of a corpus and their tokenizer; None: a new BPE."""
    n_bytes = sum(source.size_bytes for source in sources)
    log.info("preparing %.1f MB of text in %s, once", n_bytes / 1e6, folder.parent)
    if tokenizer is None:
        texts = (piece.text for piece in pieces() if not piece.is_val)
        tokenizer = train_bpe(texts, vocab_size or 0, folder / FILE_NAME, has_end)
    else:
        tokenizer.save(folder)
    end_id: Any = tokenizer.end_id if has_end else None
    if not all(write_tokens(folder, pieces(), tokenizer, end_id, n_bytes)):
        said = f"{n_bytes} bytes of text; too few to take a part of them for validation"
        raise DataError(f"{sources[0].path}: {said}")
    for source in sources:
        if source.path.stat().st_mtime_ns != source.mtime_ns:
            raise DataError(f"{source.path}: changed while it was read; start again")
