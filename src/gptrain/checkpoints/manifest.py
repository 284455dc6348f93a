"""What a checkpoint consists of, and whether it is all there: `manifest.json`.

The manifest is written last, lists every file with its size and SHA-256, and holds the SHA-256 of
its own text, so one flipped bit anywhere in the folder is seen. This finds damage, not forgery:
whoever changes a file on purpose can seal the manifest anew. Its entries: see `_is_ours`.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gptrain.checkpoints.status import to_json
from gptrain.core.errors import printable
from gptrain.core.progress import progress_bar
from gptrain.core.small_files import UnreadableFileError, open_regular, read_bytes

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.ckpt"  # all that is not in the ranks' own files
FORMAT = 1
STEP_NAME = re.compile(r"step-(\d{8,})")  # of a checkpoint's folder
# Of a network file system that is away for a while: no damage, and no reason to do without a file.
_AWAY = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_READ_BYTES = 1 << 20  # hashed while still in the processor's cache


class DamagedCheckpointError(Exception):
    """A checkpoint that is not what its manifest says, or cannot be one."""

    cause = "data"

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # as it is made again in another process
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


class NoGoodCheckpointError(Exception):
    """There are checkpoints, and none of them is whole: a person must decide."""

    cause = "data"

    def __init__(self, folder: Path, damaged: list[DamagedCheckpointError]) -> None:
        self.folder, self.damaged = folder, damaged
        reasons = "; ".join(f"{one.path.name}: {one.reason}" for one in damaged)
        super().__init__(f"{folder}: no checkpoint is good: {reasons}")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its folder and its manifest."""

    path: Path
    manifest: dict

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest["step"]


def seal(content: dict) -> bytes:
    """JSON text of the content, with the text's own hash as last entry in place of any earlier."""
    content = {"format": FORMAT} | {key: content[key] for key in content if key != "sha256"}
    return to_json(content | {"sha256": hashlib.sha256(to_json(content)).hexdigest()})


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint folder; its own seal and shape are checked, the files are not.

    Raises: DamagedCheckpointError; OSError where its file system does not answer.
    """
    try:
        return parse(read_bytes(path / MANIFEST_NAME), path)
    except (OSError, UnreadableFileError) as error:
        raise DamagedCheckpointError(path, _why_not(MANIFEST_NAME, error)) from None


def parse(text: bytes, path: Path) -> dict:
    """The manifest of the checkpoint at path, whose text was read. Raises:
    DamagedCheckpointError.
    """
    # The text is judged, not the values: JSON has many spellings of one value.
    before, _, ending = text.rpartition(b',\n "sha256": "')
    if ending != hashlib.sha256(before + b"\n}\n").hexdigest().encode() + b'"\n}\n':
        raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is damaged (sha256)")
    manifest = json.loads(text)
    if not _is_ours(manifest):
        raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is none of ours")
    return manifest


def verify(path: Path, run_id: str | None = None) -> dict:
    """The manifest of a checkpoint of which every byte was read and found right.

    A person at a terminal sees how far it is.

    Args:
        run_id: the run it must belong to, None for any.
    Raises: DamagedCheckpointError, naming the first file that is wrong; OSError where its file
    system
        does not answer.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        raise DamagedCheckpointError(
            path, f"of another run ({manifest['run_id']}, this is {run_id})"
        )
    if path.name.startswith("step-") and path.name != folder_name(manifest["step"]):
        raise DamagedCheckpointError(path, f"holds step {manifest['step']}")

    files = manifest["files"]
    n_bytes = sum(entry["bytes"] for entry in files.values())
    workers = min(8, os.cpu_count() or 1)  # hashing leaves the interpreter lock
    with progress_bar("verifying", n_bytes) as bar, ThreadPoolExecutor(workers) as pool:
        checks = [pool.submit(difference, path / name, files[name], bar.update) for name in files]
        for check in checks:
            if found := check.result():
                raise DamagedCheckpointError(path, found)
    return manifest


def difference(path: Path, expected: dict, on_piece: Callable[[int], object]) -> str | None:
    """How a file differs from its entry in a manifest; None if it does not."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes != expected["bytes"]:
                return f"{path.name} has {n_bytes} bytes, its manifest says {expected['bytes']}"
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                on_piece(len(piece))
    except (OSError, UnreadableFileError) as error:
        return _why_not(path.name, error)
    return None if digest.hexdigest() == expected["sha256"] else f"{path.name} is damaged (sha256)"


def folder_name(step: int) -> str:
    """`step-00000500`; the digits keep a listing in order."""
    return f"step-{step:08d}"


def is_file_name(name: str) -> bool:
    """Whether it names a file of this very folder; no file system has longer names."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(name) < 256


def _why_not(name: str, error: OSError | UnreadableFileError) -> str:
    if getattr(error, "errno", None) in _AWAY:
        raise error
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    why = error.reason if isinstance(error, UnreadableFileError) else error.strerror
    return f"{name} cannot be read: {why}"


def _is_ours(manifest: dict) -> bool:
    """Whether it has the entries that we write."""
    match manifest:
        case {
            "format": int(number),
            "run_id": str(),
            "step": int(step),  # order is by it, never by a file's time
            "kind": "full" | "sharded",  # one file holds everything, or every rank wrote its own
            "world_size": int(),
            "metrics": dict(metrics),
            "files": dict(files),
            "config": dict(),  # like metrics, readable without loading a tensor
        }:
            are_numbers = all(isinstance(value, int | float | None) for value in metrics.values())
            are_files = all(is_file_name(name) and _is_entry(files[name]) for name in files)
            return number == FORMAT and 0 <= step < 2**63 and are_numbers and are_files
    return False


def _is_entry(entry: object) -> bool:
    match entry:
        case {"bytes": int(), "sha256": str()}:
            return True
    return False
