"""Tokenization of a corpus to token files, on all cores and in constant memory.

The files are written to a temporary folder, which gets its final name when it is complete.
"""

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
_BATCH_BYTES = 2**20  # text that is tokenized in one call
# One batch is encoded on all cores, while the next batch is read and the previous batch is
# converted to arrays.
_THREADS = 3
_LOCK = "lock"


def write_tokens(
    folder: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, end_id: int | None, n_bytes: int
) -> list[int]:
    """Write the token files `train.bin` and `val.bin` and the document ends of both.

    A token file begins with a context: the end token, or the tokens of a newline if there is none.
    So every byte of the text is a target. The documents follow one after another. `train.ends` and
    `val.ends` hold int64 positions, counted in tokens: where the first document begins, then where
    each document ends. Each part of a text file that is divided between the splits counts as a
    document. Shows a progress bar on a terminal.

    Args:
        folder: Folder for the four files.
        pieces: Text of the corpus.
        tokenizer: Tokenizer of the text.
        end_id: Token to append to each document, or None.
        n_bytes: Size of all sources, for the progress bar.

    Returns:
        Number of tokens after the context, of the training and of the validation file.

    Raises:
        OSError: If a file cannot be written.
        DataError: If `pieces` raises it, or if a text has a character without a token.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([] if end_id is None else [end_id], dtype)
    context = end if len(end) else tokenizer.encode("\n").astype(dtype)
    n_tokens = {False: 0, True: 0}  # is_val -> tokens written

    def encode(batch: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        encoded = []
        ids = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, ids, strict=True):
            tokens = np.append(tokens, end) if piece.ends_document else tokens
            encoded.append((piece, tokens.astype(dtype)))
        return encoded

    def write(tokens: np.ndarray, is_val: bool, ends_part: bool) -> None:
        n_tokens[is_val] += len(tokens)
        tokens_files[is_val].write(tokens.tobytes())
        if ends_part:
            ends_files[is_val].write(np.array(n_tokens[is_val], LENGTHS_TYPE).tobytes())

    with ExitStack() as stack:
        # Both lists are indexed by is_val.
        tokens_files, ends_files = (
            [stack.enter_context((folder / f"{name}.{suffix}").open("wb")) for name in SPLITS]
            for suffix in ("bin", "ends")
        )
        for is_val in n_tokens:
            write(context, is_val, ends_part=True)
        bar = stack.enter_context(progress_bar("tokenizing", n_bytes))
        for batch in map_in_order(encode, batches(pieces)):
            for piece, tokens in batch:
                write(tokens, piece.is_val, piece.ends_part)
                bar.update(piece.n_read_bytes)
        for file in (*tokens_files, *ends_files):
            file.flush()
            os.fsync(file.fileno())  # the content is on disk before the folder gets its name
    return [n - len(context) for n in n_tokens.values()]


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces of text into lists of at least 1 MiB; the last list may have less.

    Args:
        pieces: Pieces of text, which are read one list at a time.
    """
    batch = []
    n_bytes = 0
    for piece in pieces:
        batch.append(piece)
        n_bytes += len(piece.text) + 1
        if n_bytes >= _BATCH_BYTES:
            yield batch
            batch = []
            n_bytes = 0
    if batch:
        yield batch


def map_in_order(encode: Callable, batches: Iterable) -> Iterator:
    """Yield `encode(batch)` for each batch, in the order of the batches, from several threads.

    At most three batches are in work at a time, so that batches are read and written while another
    batch is encoded. The package `tokenizers` releases the global interpreter lock.

    An exception of `encode` or of `batches` is raised here, after the batches in work have ended.

    Args:
        encode: Function of one batch that may run in any thread.
        batches: Batches, which are read in the calling thread.
    """
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
    """Create a folder for new files, and rename it to `target` when the `with` block succeeds.

    So `target` is complete or does not exist. If the block raises, the folder is removed. Several
    processes may prepare the same target: the folder that is renamed first stays, and every process
    finds `target` complete. Folders that killed processes of this machine have left in the same
    place are removed first: until a folder is renamed it has a locked file, and the kernel frees
    the lock when the process ends.

    Args:
        target: Final path. Missing parent folders are created.

    Yields:
        The folder, next to `target`, with a hidden name. It holds only the locked file.

    Raises:
        OSError: If the folder cannot be created or renamed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in target.parent.glob(f".{socket.gethostname()}.*"):
        with suppress(OSError), (abandoned / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            log.info("removing %s: the process that made it was killed", abandoned)
            shutil.rmtree(abandoned, ignore_errors=True)
    draft = target.with_name(f".{socket.gethostname()}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        with (draft / _LOCK).open("w") as lock:
            with suppress(OSError):  # without file locks, no process removes this folder
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield draft
            (draft / _LOCK).unlink()
            try:
                draft.rename(target)
            except OSError:
                if not target.exists():
                    raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # does nothing if the folder was renamed
