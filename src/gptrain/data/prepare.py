"""TextDataset: samples from a corpus of text, which is split and tokenized only once.

The tokens are cached in a folder whose name is a hash of the state of the files, the tokenizer and
the options of the split. Tokenization uses all cores and constant memory.
"""

import hashlib
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gptrain.core.errors import DataError
from gptrain.core.locations import expand_home
from gptrain.core.progress import progress_bar
from gptrain.data.sources import Paths, Piece, find_corpus, read_pieces
from gptrain.data.tokenizers import FILE_NAME, Tokenizer, load_tokenizer, train_bpe
from gptrain.data.tokens import TokenDataset, token_dtype

log = logging.getLogger(__name__)

FINGERPRINT_NAME = "sha256"
# Version of the folder's files and of the split, a part of the cache key. A change of either must
# increase it.
FORMAT = 7
_ENDS_TYPE = "<i8"
# Length of the beginning of a corpus in which characters that the tokenizer loses are looked for.
_CHECKED_CHARS = 2**20
_BATCH_PIECES = 64  # pieces that are tokenized in one call, at most 768 Ki characters


class TextDataset(TokenDataset):
    """Dataset of the training or the validation text of a corpus.

    The text is cut into windows of `seq_len` tokens. The validation set keeps the last, incomplete
    window, so that every byte counts. The corpus is tokenized again if the state of a file (see
    `file_states`), the tokenizer or an option of the split has changed. Several processes may open
    the same corpus at once; each gets the complete dataset.

    Args:
        split: "train" or "val".
        seq_len: Positions of a sample, T.
        path: File, folder, glob pattern or a list of these. None reads the source code of Python's
            standard library.
        tokenizer: `bytes`, `bpe` (trained on the training text), or the path of a tokenizer.json or
            of its folder.
        cache_dir: Folder for the tokens, which is made if it is missing.
        val_fraction: Fraction of the text for validation, see `read_pieces`.
        pattern: Pattern that the names of files within folders must match.
        vocab_size: Vocabulary size of the model. The tokenizer may not have more tokens. `bpe`
            learns this number of tokens, or fewer if the text is too small. None, which `bpe` does
            not allow, does not check.
        format: Format of all files: text, jsonl, json, parquet or csv. None takes the format of
            each file from its suffix.
        text_key: Key of the text in a record. None is "text".
        end_of_document: Whether to append the end token to each document. None appends it if the
            tokenizer has one, except for `bytes`.
        documents: `packed` lets windows cross the ends of documents. `masked` does as well, but a
            batch has a third item, the index of the document of each token, so that a document
            attends to itself only.

    Attributes:
        tokenizer: Tokenizer of the tokens.
        token_bytes: Bytes of text per token, (V,). None if the tokenizer is not byte-level.
        end_id: Id of the token that ends each document, or None.
        fingerprint: SHA-256 of the tokens and the document ends of both splits.
        ends: Positions in the token file, (documents + 1,): where the first document begins, then
            where each document ends. If a text file is divided between the splits, each of its
            parts counts as a document.

    Raises:
        FileNotFoundError, ModuleNotFoundError: If a path, the tokenizer or a package is missing.
        DataError: If there is too little text, if a file is damaged or has another format, if the
            tokenizer has more tokens than the model or lacks a needed one, if a file changes while
            it is read, or if the cache was modified.
        ValueError: If the `vocab_size` of a new `bpe` is too small.
    """

    def __init__(
        self,
        split: str,
        seq_len: int,
        path: Paths | None,
        tokenizer: str,
        cache_dir: str | os.PathLike,
        val_fraction: float = 0.05,
        pattern: str = "*",
        vocab_size: int | None = None,
        format: str | None = None,
        text_key: str | None = None,
        end_of_document: bool | None = None,
        documents: str = "packed",
    ) -> None:
        cache_dir = expand_home(cache_dir).resolve()
        loaded = None if tokenizer == "bpe" else load_tokenizer(tokenizer)
        if loaded and vocab_size is not None and loaded.vocab_size > vocab_size:
            raise DataError(f"tokenizer has {loaded.vocab_size} tokens, vocab_size={vocab_size}")
        by_tokenizer = loaded is None or loaded.ends_documents
        has_end = by_tokenizer if end_of_document is None else end_of_document
        if has_end and loaded and loaded.end_id is None:
            raise DataError(f"tokenizer {tokenizer} has no token for the end of a document")
        files = find_corpus(path, pattern, cache_dir)
        states = file_states(files)
        identity = loaded.identity if loaded else f"bpe:{vocab_size}"
        key = [FORMAT, states, format, identity, val_fraction, has_end, text_key]
        folder = cache_dir / hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        if not folder.exists():
            read = partial(read_pieces, files, val_fraction, format, text_key, not has_end)
            cache_dir.mkdir(parents=True, exist_ok=True)
            log.info("preparing %d files of text in %s, once", len(files), cache_dir)
            with tempfile.TemporaryDirectory(prefix=".draft-", dir=cache_dir) as name:
                draft = Path(name)
                draft.chmod(0o755)  # the folder was made for this user alone
                texts = (piece.text for piece in read() if not piece.is_val)
                used = loaded or train_bpe(texts, vocab_size or 0, draft / FILE_NAME, has_end)
                write_tokens(draft, read(), used, has_end, sum(size for _, size, *_ in states))
                if file_states(files) != states:
                    raise DataError(f"{path}: a file changed while it was read; start again")
                with suppress(OSError):  # another process may have prepared the same text first
                    draft.rename(folder)
        self.tokenizer = loaded or load_tokenizer(folder)
        self.token_bytes = self.tokenizer.token_bytes
        self.end_id = self.tokenizer.end_id if has_end else None
        self.documents = documents
        dtype = token_dtype(self.tokenizer.vocab_size)
        super().__init__(folder / f"{split}.bin", seq_len, dtype, keep_tail=split == "val")
        self.ends = np.fromfile(folder / f"{split}.ends", _ENDS_TYPE)
        if self.ends[-1:] != [self.n_tokens]:
            raise DataError(f"{folder}: damaged; delete it, it will be prepared again")
        self.fingerprint = (folder / FINGERPRINT_NAME).read_text()

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens, targets and, with `masked`, documents, each (B, T) and int64."""
        tokens, targets = super().__getitems__(indices)
        if self.documents != "masked":
            return tokens, targets
        # The token before a document's first token belongs to the document, as its context.
        positions = np.asarray(indices)[:, None] * self.seq_len + np.arange(1, self.seq_len + 1)
        documents = np.searchsorted(self.ends, positions, side="right") - 1  # (B, T)
        begins = torch.from_numpy(positions == self.ends[documents])
        tokens[begins] = int(self.files[0][0])
        return tokens, targets, torch.from_numpy(documents)

    def describe(self, n_samples: int = 0) -> str:
        """Return a line with the number of tokens and documents, and the epochs of `n_samples`."""
        end = f"each ended by {self.tokenizer.end_token}"
        ends = "nothing between them" if self.end_id is None else end
        n_documents = f"{len(self.ends) - 1:,} documents"
        return f"{super().describe(n_samples)} · {n_documents}, {ends}, {self.documents}"


def file_states(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Return real path, size, modification time, change time in ns and inode of each file.

    A change of the content changes the state: no program can set the change time (ctime).
    """
    stats = [(os.path.realpath(file), file.stat()) for file in files]
    return [(p, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for p, s in stats]


def write_tokens(
    folder: Path, pieces: Iterator[Piece], tokenizer: Tokenizer, has_end: bool, n_bytes: int
) -> None:
    """Write `train.bin` and `val.bin`, the document ends of both, and their hash.

    A token file begins with a context, the end token or the tokens of a newline, so that every byte
    of the text is a target. `train.ends` and `val.ends` hold int64 positions in tokens: where the
    first document begins, then where each ends.
    """
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    end = np.array([tokenizer.end_id] if has_end else [], dtype)
    context = end if has_end else tokenizer.encode("\n").astype(dtype)
    n_checked = 0  # characters
    digest = hashlib.sha256()

    def write(tokens: np.ndarray, is_val: bool, ends_part: bool) -> None:
        n_tokens = files[is_val][0].tell() // dtype.itemsize + len(tokens)
        ends = np.array([n_tokens] if ends_part else [], _ENDS_TYPE)
        for file, content in zip(files[is_val], (tokens, ends), strict=True):
            file.write(content.tobytes())
            digest.update(content.tobytes())

    with ExitStack() as stack:
        paths = [(folder / f"{name}.bin", folder / f"{name}.ends") for name in ("train", "val")]
        files = [[stack.enter_context(path.open("wb")) for path in pair] for pair in paths]
        for is_val in (False, True):
            write(context, is_val, ends_part=True)
        bar = stack.enter_context(progress_bar("tokenizing", n_bytes))
        for batch in read_ahead(pieces):
            texts = [piece.text for piece in batch]
            encoded = tokenizer.encode_batch(texts)
            if n_checked < _CHECKED_CHARS:
                n_checked += sum(map(len, texts))
                warn_of_lost_characters(tokenizer, "".join(texts), np.concatenate(encoded))
            for piece, ids in zip(batch, encoded, strict=True):
                tokens = np.append(ids, end) if piece.ends_document else ids
                write(tokens.astype(dtype), piece.is_val, piece.ends_part)
                bar.update(len(piece.text))
        (folder / FINGERPRINT_NAME).write_text(digest.hexdigest())
        for file in (*files[0], *files[1]):
            file.flush()
            os.fsync(file.fileno())  # the content is on disk before the folder gets its name


def read_ahead(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Yield batches of pieces. A thread reads the next batch while the caller uses one."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(list[Piece], islice(pieces, _BATCH_PIECES))
        while batch := following.result():
            following = pool.submit(list[Piece], islice(pieces, _BATCH_PIECES))
            yield batch


def warn_of_lost_characters(tokenizer: Tokenizer, text: str, tokens: np.ndarray) -> None:
    """Warn if the tokens of some text do not give back all of its characters except white space.

    A BPE without an unknown token and without all bytes drops characters in silence.
    """
    if normalizer := tokenizer.core.normalizer:
        text = normalizer.normalize_str(text)
    lost = Counter(text) - Counter(tokenizer.decode(tokens))
    chars = [char for char, _ in lost.most_common() if not char.isspace() and char != "▁"]
    if chars:
        message = f"loses characters of the text, such as {' '.join(chars[:5])}"
        warnings.warn(f"data.tokenizer: {message}; try: data.tokenizer=bpe", stacklevel=2)
