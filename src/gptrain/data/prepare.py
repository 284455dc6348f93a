"""Text to token files, on all cores, in constant memory; a folder has its name once it is whole."""

import fcntl
import logging
import os
import shutil
import socket
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from gptrain.core.progress import progress_bar
from gptrain.data.corpus import Piece
from gptrain.data.tokenizers import Tokenizer
from gptrain.data.tokens import token_dtype

log = logging.getLogger(__name__)

SPLITS = ("train", "val")
LENGTHS_TYPE = "<i8"
_BATCH_BYTES = 2**20  # of text that are tokenized at once
_THREADS = 3  # a batch is encoded on all cores; meanwhile others are read, and made arrays
_LOCK = "lock"


def write_tokens(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, end_id: int | None, n_bytes: int
) -> list[int]:
    """Writes `train.bin`, `val.bin`: a token of context, then document after document.

    The context is the end token, or a newline, so that every byte of the text is a target. Beside
    them `train.ends`, `val.ends`: int64, where the first document begins and each one ends, in
    tokens. Returns the number of targets of both.

    Args:
        end_id: token after each document; None: none.   n_bytes: of all sources.
    Raises: OSError; DataError of the pieces.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([] if end_id is None else [end_id], dtype)
    context = end if len(end) else tokenizer.encode("\n").astype(dtype)
    n_tokens = {False: 0, True: 0}  # by is_val

    def encode(batch: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        encoded = []
        ids = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, ids, strict=True):
            tokens = np.append(tokens, end) if piece.is_end else tokens
            encoded.append((piece, tokens.astype(dtype)))
        return encoded

    def write(tokens: np.ndarray, is_val: bool, is_last: bool) -> None:
        n_tokens[is_val] += len(tokens)
        tokens_files[is_val].write(tokens.tobytes())
        if is_last:
            ends_files[is_val].write(np.array(n_tokens[is_val], LENGTHS_TYPE).tobytes())

    with ExitStack() as stack:
        tokens_files, ends_files = (
            [stack.enter_context((folder / f"{name}.{suffix}").open("wb")) for name in SPLITS]
            for suffix in ("bin", "ends")
        )
        for is_val in n_tokens:
            write(context, is_val, is_last=True)
        bar = stack.enter_context(progress_bar("tokenizing", n_bytes))
        for batch in in_order(encode, batches(pieces)):
            for piece, tokens in batch:
                write(tokens, piece.is_val, piece.is_last)
                bar.update(piece.n_read)
        for file in (*tokens_files, *ends_files):
            file.flush()
            os.fsync(file.fileno())  # before the folder gets its name
    return [n - len(context) for n in n_tokens.values()]


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about 1 MiB of text."""
    batch, n_bytes = [], 0
    for piece in pieces:
        batch.append(piece)
        n_bytes += len(piece.text) + 1
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def in_order(encode: Callable, batches: Iterable) -> Iterator:
    """`encode` of each batch, in their order, in threads: it leaves the interpreter to others."""
    waiting = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for batch in batches:
            waiting.append(pool.submit(encode, batch))
            if len(waiting) == _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def fresh_folder(target: Path) -> Generator[Path, None, None]:
    """An empty folder that becomes `target` if the block succeeds, and else is removed.

    Another process may do the same: the first one's folder stays, both find `target` complete.
    What a killed process of this machine has left is removed first: nobody holds its lock.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{socket.gethostname()}.*"):
        with suppress(OSError), (left / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s: its process was killed", left)
            shutil.rmtree(left, ignore_errors=True)
    draft = target.with_name(f".{socket.gethostname()}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        with (draft / _LOCK).open("w") as lock:
            with suppress(OSError):  # a file system without locks: nobody will remove it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield draft
            (draft / _LOCK).unlink()
            try:
                draft.rename(target)
            except OSError:
                if not target.exists():
                    raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone, if it was renamed
