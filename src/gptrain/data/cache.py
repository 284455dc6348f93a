"""Prepared text in the cache: a folder with two token files, their tokenizer, and a manifest.

A folder is complete or absent. It may also have been copied, damaged or made by a stranger: the
manifest is checked for its form, and its token files must be regular ones and no links.
"""

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptrain.data import DataError
from gptrain.data.tokenizers import ByteTokenizer, JsonTokenizer, load_tokenizer
from gptrain.small_files import UnreadableFile, read_json

MANIFEST = "manifest.json"
_ABANDONED_S = 24 * 3600  # nothing was written for a day: the process is gone


@dataclass(frozen=True)
class PreparedText:
    """The token files of a corpus and what is known of them."""

    folder: Path
    vocab_size: int
    dtype: str

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "PreparedText":
        """The prepared text of a folder, if its token files are those that were written.

        Their sizes are compared. They are hashed only when a time stamp is not the one noted
        when they were written, as after a copy; a file that is right gets its time stamp back.

        Raises: DataError that names the file.
        """
        folder = Path(folder)
        try:
            manifest = read_json(folder / MANIFEST)
        except FileNotFoundError:
            raise DataError(f"{folder}: holds no {MANIFEST}") from None
        except UnreadableFile as error:
            raise DataError(str(error)) from None
        match manifest:
            case {
                "vocab_size": int(vocab_size),
                "dtype": "uint16" | "uint32" as dtype,
                "files": {"train.bin": dict(train), "val.bin": dict(val)},
            }:
                prepared = cls(folder, vocab_size, dtype)
            case _:
                raise DataError(f"{folder / MANIFEST}: not the manifest of prepared text")
        _check_file(prepared.train_file, train)
        _check_file(prepared.val_file, val)
        return prepared

    @property
    def train_file(self) -> Path:
        return self.folder / "train.bin"

    @property
    def val_file(self) -> Path:
        return self.folder / "val.bin"

    def tokenizer(self) -> ByteTokenizer | JsonTokenizer:
        """The tokenizer that made the tokens."""
        return load_tokenizer(self.folder)


def check_prepared(file: Path) -> None:
    """Raises DataError if a token file is one of a prepared text and no longer as it was."""
    if file.name in ("train.bin", "val.bin") and (file.parent / MANIFEST).exists():
        PreparedText.load(file.parent)


def _check_file(file: Path, noted: dict[str, Any]) -> None:
    """Raises DataError unless a token file is a regular one that is as its manifest says."""
    match noted:
        case {"size_bytes": int(noted_bytes), "mtime_ns": int(mtime_ns), "sha256": str(sha256)}:
            pass
        case _:
            raise DataError(f"{file.parent / MANIFEST}: not the manifest of prepared text")
    if file.is_symlink() or not file.is_file():
        raise DataError(f"{file}: missing, or not a regular file")
    status = file.stat()
    if status.st_size != noted_bytes:
        raise DataError(f"{file}: {status.st_size} bytes, {noted_bytes} in {MANIFEST}")
    if status.st_mtime_ns == mtime_ns:
        return
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
    if digest.hexdigest() != sha256:
        raise DataError(f"{file}: sha256 differs from {MANIFEST}")
    with suppress(OSError, OverflowError):  # a cache that may only be read is hashed at every start
        os.utime(file, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def file_entry(path: Path, sha256: str) -> dict[str, Any]:
    """What a manifest says of a token file."""
    status = path.stat()
    return {"size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": sha256}


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """An empty folder that becomes `target` if the block succeeds, and else is removed.

    Another process may do the same: the first one's folder stays, both find `target` complete.
    What a killed process left behind is removed a day later.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.glob(f".{target.name}.*"):
        with suppress(OSError):
            newest_s = max(path.stat().st_mtime for path in (old, *old.iterdir()))
            if time.time() - newest_s > _ABANDONED_S:
                shutil.rmtree(old)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    draft.mkdir()
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            _flush(path)
        try:
            draft.rename(target)
        except OSError:
            if not target.exists():
                raise
        _flush(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone, if it was renamed


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
