"""`manifest.json`: the list of a checkpoint's files, and the verification of a checkpoint.

The manifest is written last. It lists every file with its size and SHA-256, and it ends with the
SHA-256 of its own text, so that one flipped bit anywhere in the folder is detected. This protects
against damage, not against forgery: whoever changes a file on purpose can write a new manifest.
`_is_manifest` lists the entries.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptrain.checkpoints.status import to_json
from gptrain.core.errors import BAD_DATA, RunError, printable
from gptrain.core.progress import progress_bar
from gptrain.core.small_files import UnreadableFileError, open_regular, read_bytes

MANIFEST_NAME = "manifest.json"
REST_NAME = "state.ckpt"  # counters, options, random states and states of callbacks
FORMAT = 2
LAST_OF_FORMAT_1 = "a9c18679"  # commit of gptrain
STEP_NAME = re.compile(r"step-(\d{8,})")  # name of a checkpoint's folder
# Errors of a network file system that does not answer. They do not mean that a file is damaged.
_NO_ANSWER = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_READ_BYTES = 1 << 20  # small enough to stay in the processor's cache while it is hashed


class DamagedCheckpointError(RunError):
    """Raised if a checkpoint, or one of its files, is missing, damaged or not a checkpoint at all.

    Args:
        path: Path of the checkpoint or the file.
        reason: Explanation for the user, in a few words.
    """

    code = BAD_DATA
    cause = "data"

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # pickle calls the class with these arguments
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


class OldFormatError(DamagedCheckpointError):
    """Raised if a checkpoint was written by a version of gptrain with another format."""


class AllDamagedError(RunError):
    """Raised if there are checkpoints and all of them are damaged. The user must decide what to do.

    Args:
        folder: Folder of the checkpoints.
        damaged: Error of each checkpoint.
    """

    code = BAD_DATA
    cause = "data"

    def __init__(self, folder: Path, damaged: list[DamagedCheckpointError]) -> None:
        self.folder = folder
        self.damaged = damaged
        reasons = "; ".join(f"{error.path.name}: {error.reason}" for error in damaged)
        super().__init__(f"{folder}: no checkpoint is intact: {reasons}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were all verified: each has the size and the hash in the manifest.

    Attributes:
        path: Folder of the checkpoint.
        manifest: Content of its manifest.json.
    """

    path: Path
    manifest: dict

    @property
    def step(self) -> int:
        """Number of optimizer steps that were done when the checkpoint was saved."""
        return self.manifest["step"]


def seal(content: dict) -> bytes:
    """Return the text of manifest.json, which lists the files of a checkpoint.

    The last entry, `sha256`, is the hash of the text of all other entries.

    Args:
        content: Entries of the manifest. `format` is added, and an old `sha256` is replaced.
    """
    content = {"format": FORMAT} | {key: content[key] for key in content if key != "sha256"}
    return to_json(content | {"sha256": hashlib.sha256(to_json(content)).hexdigest()})


def read_manifest(path: Path) -> dict:
    """Return the manifest of a checkpoint, after a check of its own hash and entries.

    The files that it lists are not checked.

    Args:
        path: Folder of the checkpoint.

    Raises:
        DamagedCheckpointError: If the manifest is missing or damaged, or lacks an entry.
        OSError: If the network file system does not answer.
    """
    try:
        return parse(read_bytes(path / MANIFEST_NAME), path)
    except (OSError, UnreadableFileError) as error:
        raise DamagedCheckpointError(path, _reason(MANIFEST_NAME, error)) from None


def parse(text: bytes, path: Path) -> dict:
    """Return the entries of a manifest from its text, after a check of its hash and its entries.

    Args:
        text: Content of manifest.json.
        path: Folder of the checkpoint, for the error.

    Raises:
        DamagedCheckpointError: If the manifest is damaged or lacks an entry.
    """
    # The hash is that of the text, not of the values: JSON has many spellings of one value.
    before, _, ending = text.rpartition(b',\n "sha256": "')
    if ending != hashlib.sha256(before + b"\n}\n").hexdigest().encode() + b'"\n}\n':
        raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is damaged (sha256)")
    with suppress(ValueError, RecursionError):  # a forged text has the right hash and is not JSON
        manifest = json.loads(text)
        if isinstance(manifest, dict) and manifest.get("format") == 1:
            reason = f"written by gptrain up to commit {LAST_OF_FORMAT_1}, which can read it"
            raise OldFormatError(path, reason)
        if _is_manifest(manifest):
            return manifest
    raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is not a manifest of gptrain")


def verify(path: Path, run_id: str | None = None) -> dict:
    """Read and check every byte of a checkpoint, and return its manifest.

    Shows a progress bar on a terminal.

    Args:
        path: Folder of the checkpoint.
        run_id: Identity of the run to which the checkpoint must belong. None allows any run.

    Raises:
        DamagedCheckpointError: If the checkpoint is damaged or of another run. The error names the
            first wrong file.
        OSError: If the network file system does not answer.
    """
    manifest = read_manifest(path)
    if run_id is not None and manifest["run_id"] != run_id:
        message = f"belongs to another run ({manifest['run_id']}, this is {run_id})"
        raise DamagedCheckpointError(path, message)
    if path.name.startswith("step-") and path.name != folder_name(manifest["step"]):
        raise DamagedCheckpointError(path, f"holds step {manifest['step']}")

    files = manifest["files"]
    n_bytes = sum(entry["bytes"] for entry in files.values())
    workers = min(8, os.cpu_count() or 1)  # hashing releases the interpreter lock
    with progress_bar("verifying", n_bytes) as bar, ThreadPoolExecutor(workers) as pool:
        checks = [pool.submit(difference, path / name, files[name], bar.update) for name in files]
        for check in checks:
            reason = check.result()
            if reason:
                raise DamagedCheckpointError(path, reason)
    return manifest


def difference(path: Path, expected: dict, on_piece: Callable[[int], object]) -> str | None:
    """Return how a file differs from its entry in a manifest, or None if it is equal.

    A file that is missing or cannot be read counts as different.

    Args:
        path: File.
        expected: Entry of the manifest: `bytes` (size) and `sha256`.
        on_piece: Function that is called with the size in bytes of each piece that was read.

    Raises:
        OSError: If the network file system does not answer.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes != expected["bytes"]:
                return f"{path.name} has {n_bytes} bytes, its manifest lists {expected['bytes']}"
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                on_piece(len(piece))
    except (OSError, UnreadableFileError) as error:
        return _reason(path.name, error)
    return None if digest.hexdigest() == expected["sha256"] else f"{path.name} is damaged (sha256)"


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder, such as `step-00000500`, which sorts by step."""
    return f"step-{step:08d}"


def is_file_name(name: str) -> bool:
    """Return whether a text can be the name of a file directly in a folder.

    A text from an untrusted file must not lead out of the folder, as `../x` would.

    Args:
        name: Text to check. A name has at most 255 characters.
    """
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(name) < 256


def _reason(name: str, error: OSError | UnreadableFileError) -> str:
    """Return a phrase that says why a file cannot be read.

    Args:
        name: Name of the file.
        error: Error of the attempt to read it.

    Raises:
        OSError: The error itself, if a network file system does not answer: the file may be intact.
    """
    if getattr(error, "errno", None) in _NO_ANSWER:
        raise error
    if isinstance(error, FileNotFoundError):
        return f"{name} is missing"
    reason = error.reason if isinstance(error, UnreadableFileError) else error.strerror
    return f"{name} cannot be read: {reason}"


def _is_manifest(manifest: dict) -> bool:
    """Return whether a value that was read from JSON is a manifest with all of its entries.

    Args:
        manifest: Value of any type.
    """
    match manifest:
        case {
            "format": int(number),
            "run_id": str(),
            "step": int(step),  # checkpoints are ordered by step, never by the times of files
            "metrics": dict(metrics),
            "files": dict(files),
            "config": dict(),  # readable without loading a tensor, like the metrics
        }:
            are_numbers = all(isinstance(value, int | float | None) for value in metrics.values())
            are_files = all(is_file_name(name) and _is_entry(files[name]) for name in files)
            return number == FORMAT and 0 <= step < 2**63 and are_numbers and are_files
    return False


def _is_entry(entry: object) -> bool:
    """Return whether a value is the manifest's entry of a file: `bytes` (size) and `sha256`."""
    match entry:
        case {"bytes": int(), "sha256": str()}:
            return True
    return False
