"""What a valid checkpoint is: a folder whose manifest lists every file, and whose bytes are intact.

`manifest.json` lists every file with its size and SHA-256, and ends with the SHA-256 of its own
entries, so that one flipped bit anywhere in the folder is detected. This protects against damage,
not against forgery.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from gptrain.checkpoints import files
from gptrain.core.progress import progress_bar
from gptrain.core.small_files import UnreadableFileError, open_regular, read_bytes

MANIFEST_NAME = "manifest.json"
REST_NAME = "state.ckpt"  # counters, options, random states and states of callbacks
STEP_NAME = re.compile(r"step-\d{8,}")  # name of a checkpoint's folder
FORMAT = 2
# Errors of a network file system that does not answer: the file may be intact
_NO_ANSWER = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_READ_BYTES = 1 << 20  # small enough to stay in the processor's cache while it is hashed

# A file's name must not lead out of the folder, as `../x` would.
FileName = Annotated[str, Field(pattern="^[0-9A-Za-z_][0-9A-Za-z_.-]*$")]


class FileEntry(TypedDict):
    """Size and hash of one file."""

    bytes: int
    sha256: str


class Manifest(TypedDict):
    """Entries of a manifest. Checkpoints are ordered by step, never by the times of files."""

    format: Literal[2]
    run_id: str
    step: Annotated[int, Field(ge=0, lt=2**63)]
    metrics: dict[str, float | None]
    config: dict[str, Any]
    files: dict[FileName, FileEntry]


_MANIFEST = TypeAdapter(Manifest)


class DamagedCheckpointError(UnreadableFileError):
    """Raised if a checkpoint, a file, or all checkpoints of a folder are damaged or missing.

    `path` is the checkpoint, the file or the folder, and `reason` a phrase about the damage.
    """


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder, such as `step-00000500`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def seal(entries: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest.json with these entries, its format and its own hash."""
    content = {"format": FORMAT, **entries}
    return files.to_json(content | {"sha256": _digest(content)})


def parse(text: bytes, path: Path) -> Manifest:
    """Return the entries of a manifest, after a check of its hash and of their types.

    Raises a DamagedCheckpointError about `path`.
    """
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        entries = json.loads(text)
        if entries.pop("sha256") == _digest(entries):
            return _MANIFEST.validate_python(entries, strict=True)
    if text.startswith(b'{\n "format": 1,'):
        raise DamagedCheckpointError(path, "of gptrain up to commit a9c18679, which reads it")
    raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is damaged")


def _digest(entries: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the entries of a manifest."""
    return hashlib.sha256(files.to_json(entries)).hexdigest()


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the folder of a checkpoint, without a check of the listed files.

    Raises the errors of `verify`, about the manifest only.
    """
    with _damage(path, MANIFEST_NAME):
        text = read_bytes(path / MANIFEST_NAME)
    return parse(text, path)


def verify(path: Path, run_id: str | None = None) -> Manifest:
    """Read and check every byte of a checkpoint, with a progress bar, and return its manifest.

    Args:
        path: Folder of the checkpoint.
        run_id: Identity of the run to which the checkpoint must belong. None allows any run.

    Raises:
        DamagedCheckpointError: If the checkpoint is damaged, missing, of another run, or of another
            step than the name of its folder.
        OSError: If the network file system does not answer.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        message = f"belongs to another run ({manifest['run_id']}, this is {run_id})"
        raise DamagedCheckpointError(path, message)
    if path.name.startswith("step-") and path.name != folder_name(manifest["step"]):
        raise DamagedCheckpointError(path, f"holds step {manifest['step']}")
    entries = manifest["files"]
    n_bytes = sum(entry["bytes"] for entry in entries.values())
    workers = min(8, os.cpu_count() or 1)  # hashing releases the interpreter lock
    with progress_bar("verifying", n_bytes) as bar, ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(lambda name: _check(path, name, entries[name], bar.update), entries):
            pass  # a check raises its error here
    return manifest


def _check(folder: Path, name: str, entry: FileEntry, on_piece: Callable[[int], object]) -> None:
    """Raise a DamagedCheckpointError if a file differs from its entry in the manifest."""
    digest, n_bytes = hashlib.sha256(), 0
    with _damage(folder, name), open_regular(folder / name) as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            n_bytes += len(piece)
            on_piece(len(piece))
    if n_bytes != entry["bytes"]:
        reason = f"{name} has {n_bytes} bytes, its manifest lists {entry['bytes']}"
        raise DamagedCheckpointError(folder, reason)
    if digest.hexdigest() != entry["sha256"]:
        raise DamagedCheckpointError(folder, f"{name} is damaged (sha256)")


@contextmanager
def _damage(path: Path, name: str) -> Generator[None, None, None]:
    """Turn errors of a file into a DamagedCheckpointError, except those in _NO_ANSWER."""
    try:
        yield
    except (OSError, UnreadableFileError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ANSWER:
            raise
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise DamagedCheckpointError(path, f"{name} cannot be read: {reason}") from None
