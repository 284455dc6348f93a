"""Folders that are complete or absent, and hashes that are not taken twice.

Hashing a corpus means reading it. Its files' names, sizes and time stamps are enough to find the
hash that was taken when they last were the same: a small file per state, in `index/`.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gptrain.data.bar import with_bar
from gptrain.data.corpus import Document, hash_document

_TICK_S = 0.02  # time stamps of Linux file systems move every 4 to 10 ms
_YOUNG_S = 60  # between making a folder and locking it there is less than that


@dataclass(frozen=True)
class TextHash:
    """SHA-256 over names and contents, and the names of the files left out as no UTF-8."""

    digest: str
    skipped: tuple[str, ...]


def signature(documents: Sequence[Document]) -> str:
    """What changes when a file is added, removed, moved or written to; no file is read."""
    states = [(d.name, str(d.path), d.size_bytes, d.mtime_ns) for d in documents]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def known_hash(documents: Sequence[Document], cache_dir: Path) -> TextHash | None:
    """The hash of a corpus that has been taken in this state before, else None."""
    with suppress(FileNotFoundError, ValueError):  # the latter: emptied by a power cut
        known = json.loads(_index_file(documents, cache_dir).read_text())
        return TextHash(known["digest"], tuple(known["skipped"]))
    return None


def take_hash(documents: Sequence[Document], cache_dir: Path) -> TextHash:
    """Reads and hashes a whole corpus, and remembers the result."""
    newest_s = max(document.mtime_ns for document in documents) / 1e9
    if 0 <= time.time() - newest_s < _TICK_S:
        time.sleep(_TICK_S)  # a file written to again in the same tick would look unchanged
    digest, skipped = hashlib.sha256(), []
    total_bytes = sum(document.size_bytes for document in documents)
    for document in with_bar(documents, "hash", total_bytes, lambda doc: doc.size_bytes):
        content = hash_document(document)
        if content is None:
            skipped.append(document.name)
        else:
            digest.update(f"{document.name!r} {content}\n".encode())
    taken = TextHash(digest.hexdigest(), tuple(skipped))
    file = _index_file(documents, cache_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    draft.write_text(json.dumps(asdict(taken)))
    draft.replace(file)
    return taken


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` if the block succeeds, and else is removed.

    Another process may do the same: the first one's folder stays, both find `target` complete.
    What a killed process left behind is removed by the next one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    lock = _try_lock(draft)  # held while we live: how others know
    try:
        yield draft
        for file in draft.iterdir():
            _flush(file)
        _flush(draft)
        with _unless_there():
            draft.rename(target)
            _flush(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone, if it was renamed
        if lock is not None:
            os.close(lock)


def remove_folder(folder: Path) -> None:
    """Removes a folder such that no one meets a half of it."""
    doomed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _index_file(documents: Sequence[Document], cache_dir: Path) -> Path:
    return cache_dir / "index" / f"{signature(documents)}.json"


def _remove_abandoned(target: Path) -> None:
    for draft in target.parent.glob(f".{target.name}.*"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime < _YOUNG_S:
                continue
            lock = _try_lock(draft)
            if lock is not None:
                shutil.rmtree(draft, ignore_errors=True)
                os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A lock on a folder that ends with this process; None if held or not to be had (NFS)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _unless_there() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
