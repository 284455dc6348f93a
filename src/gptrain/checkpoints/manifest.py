"""What a valid checkpoint is: a folder whose manifest lists every file, and whose bytes are intact.

`manifest.json` lists every file with its size and SHA-256, and ends with the SHA-256 of its own
entries, so that one flipped bit anywhere in the folder is detected. This protects against damage,
not against forgery.
"""

import errno
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gptrain.checkpoints import files
from gptrain.core.errors import first_line
from gptrain.core.progress import progress_bar
from gptrain.core.small_files import UnreadableFileError, open_regular

MANIFEST_NAME = "manifest.json"
REST_NAME = "state.ckpt"  # counters, options, random states and states of callbacks
STEP_NAME = re.compile(r"step-\d{8,}")  # name of a checkpoint's folder
# Errors of a network file system that does not answer: the file may be intact
_NO_ANSWER = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_READ_BYTES = 1 << 20  # small enough to stay in the processor's cache while it is hashed

# A file's name must not lead out of the folder, as `../x` would.
FileName = Annotated[str, Field(pattern="^[0-9A-Za-z_][0-9A-Za-z_.-]*$")]


class FileEntry(BaseModel, strict=True):
    """Size and hash of one file."""

    bytes: int
    sha256: str


class Manifest(BaseModel, strict=True, validate_assignment=True):
    """Entries of a manifest. Checkpoints are ordered by step, never by the times of files.

    `run_id` is empty for a checkpoint that belongs to no run. `config` describes the run, `metrics`
    are those of the validation after the step. `phase_s` has the seconds of each phase of the run
    until `saved_at`, the Unix time at which the save began (see goodput.py).
    """

    format: Literal[2] = 2
    run_id: str
    step: Annotated[int, Field(ge=0, lt=2**63)]
    config: dict[str, Any] = {}
    saved_at: float = Field(default_factory=time.time)
    phase_s: dict[str, Annotated[float, Field(ge=0)]] = {}
    metrics: dict[str, float | None] = {}
    files: dict[FileName, FileEntry] = {}


class DamagedCheckpointError(UnreadableFileError):
    """Raised if a checkpoint, a file, or all checkpoints of a folder are damaged or missing.

    `path` is the checkpoint, the file or the folder, and `reason` a phrase about the damage.
    """


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder, such as `step-00000500`."""
    return f"step-{step:08d}"


def hidden(path: Path) -> Path:
    """Return the hidden folder in which the checkpoint `path` is written or removed."""
    return path.with_name(f".draft-{path.name}")


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def seal(entries: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest.json with these entries and their SHA-256."""
    digest = hashlib.sha256(files.to_json(entries)).hexdigest()
    return files.to_json({**entries, "sha256": digest})


def parse(text: bytes, path: Path) -> Manifest:
    """Return the manifest with this text, after a check of its hash and of its types.

    Raises a DamagedCheckpointError about `path`.
    """
    with suppress(ValueError, LookupError, RecursionError):
        entries = json.loads(text)
        manifest = Manifest.model_validate(entries)
        del entries["sha256"]
        if seal(entries) == text:
            return manifest
    if text.startswith(b'{\n "format": 1,'):
        raise DamagedCheckpointError(path, "of gptrain up to commit a9c18679, which reads it")
    raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is damaged")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the folder of a checkpoint, without a check of the listed files.

    Raises the errors of `verify`, about the manifest only.
    """
    return parse(b"".join(_read(path, MANIFEST_NAME)), path)


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
    if run_id not in (None, manifest.run_id):
        raise DamagedCheckpointError(path, f"belongs to another run ({manifest.run_id})")
    if path.name.startswith("step-") and path.name != folder_name(manifest.step):
        raise DamagedCheckpointError(path, f"holds step {manifest.step}")
    n_bytes = sum(entry.bytes for entry in manifest.files.values())
    # Hashing releases the interpreter lock.
    with progress_bar("verifying", n_bytes) as bar, ThreadPoolExecutor(8) as pool:
        checks = pool.map(lambda item: _check(path, *item, bar.update), manifest.files.items())
        list(checks)  # raises the error of a check
    return manifest


def _check(folder: Path, name: str, entry: FileEntry, on_piece: Callable[[int], object]) -> None:
    """Raise a DamagedCheckpointError if a file differs from its entry in the manifest."""
    digest = hashlib.sha256()
    for piece in _read(folder, name):
        digest.update(piece)
        on_piece(len(piece))
    if digest.hexdigest() != entry.sha256:
        raise DamagedCheckpointError(folder, f"{name} is damaged (sha256)")


def _read(folder: Path, name: str) -> Iterator[bytes]:
    """Yield the content of a file in pieces. Its errors, except those in _NO_ANSWER, are damage."""
    try:
        with open_regular(folder / name) as file:
            while piece := file.read(_READ_BYTES):
                yield piece
    except (OSError, UnreadableFileError) as error:
        if getattr(error, "errno", None) in _NO_ANSWER:
            raise
        raise DamagedCheckpointError(folder, first_line(error)) from None
