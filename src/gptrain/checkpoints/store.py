"""CheckpointStore: a folder of checkpoints, each of which is complete or does not exist.

A save writes into the hidden folder `.draft-step-00000500`: first the files, each hashed and
synced, then the manifest. The folder is synced, renamed to `step-00000500`, and its parent is
synced. A process that is killed at any point leaves the earlier checkpoints. Loading takes the
highest step of which every byte is verified. A step is saved before its validation, and
`set_metrics` adds the metrics afterwards.

`manifest.json` lists every file with its size and SHA-256, and ends with the SHA-256 of its own
text, so that one flipped bit anywhere in the folder is detected. This protects against damage, not
against forgery.

`step-00000500.corrupt` failed its verification and is kept for the user to look at.
`.trash-step-00000500` is being removed: a half removed folder must not look like a checkpoint.
`.copy-step-00000500` is being copied from a mirror, and is not verified yet.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptrain.checkpoints import files
from gptrain.core.errors import BAD_DATA, RunError, printable
from gptrain.core.progress import progress_bar
from gptrain.core.small_files import UnreadableFileError, open_regular, read_bytes

if TYPE_CHECKING:  # these modules import torch, which takes seconds; many stores only read
    from gptrain.checkpoints.save import Save
    from gptrain.checkpoints.tensors import Tensors

_log = logging.getLogger(__name__)
MANIFEST_NAME = "manifest.json"
REST_NAME = "state.ckpt"  # counters, options, random states and states of callbacks
FORMAT = 2
# Types of the entries of a manifest. Checkpoints are ordered by step, never by the times of files.
ENTRIES = {"run_id": str, "step": int, "metrics": dict, "files": dict, "config": dict}
LAST_OF_FORMAT_1 = "a9c18679"  # commit of gptrain
STEP_NAME = re.compile(r"step-\d{8,}")  # name of a checkpoint's folder
FILE_NAME = re.compile(r"\w[\w.-]{0,254}")  # must not lead out of the folder, as `../x` would
# Errors of a network file system that does not answer
_NO_ANSWER = (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_READ_BYTES = 1 << 20  # small enough to stay in the processor's cache while it is hashed
Gather = Callable[[Any], list[Any]]  # collective function: one value of each rank, on all ranks


class DamagedCheckpointError(RunError):
    """Raised if a checkpoint, a file of it, or all checkpoints of a folder cannot be used.

    `reason` explains it to the user, in a few words.
    """

    code = BAD_DATA
    cause = "data"

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(path, reason)  # pickle calls the class with these arguments
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


class OldFormatError(DamagedCheckpointError):
    """Raised if an old version of gptrain has written a checkpoint, which is intact for it."""


@dataclass(frozen=True)
class Checkpoint:
    """Folder and manifest of a checkpoint whose files were all verified."""

    path: Path
    manifest: dict

    @property
    def step(self) -> int:
        """Number of optimizer steps that were done when the checkpoint was saved."""
        return self.manifest["step"]


def folder_name(step: int) -> str:
    """Return the name of a checkpoint's folder, such as `step-00000500`."""
    return f"step-{step:08d}"


# Manifests


def seal(entries: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest.json with these entries, its format and its own hash."""
    content = {"format": FORMAT, **entries}
    content.pop("sha256", None)
    digest = hashlib.sha256(files.to_json(content)).hexdigest()
    return files.to_json(content | {"sha256": digest})


def parse(text: bytes, path: Path) -> dict:
    """Return the entries of a manifest, after a check of its hash and of their types.

    Raises a DamagedCheckpointError about `path`, or an OldFormatError.
    """
    # The hash is that of the text, not of the values: JSON has many spellings of one value.
    before, _, ending = text.rpartition(b',\n "sha256": "')
    if ending != hashlib.sha256(before + b"\n}\n").hexdigest().encode() + b'"\n}\n':
        raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is damaged (sha256)")
    manifest: Any = None
    with suppress(ValueError, RecursionError):  # a forged text has the right hash and is not JSON
        manifest = json.loads(text)
    if _is_manifest(manifest):
        return manifest
    if isinstance(manifest, dict) and manifest.get("format") == 1:
        reason = f"written by gptrain up to commit {LAST_OF_FORMAT_1}, which can read it"
        raise OldFormatError(path, reason)
    raise DamagedCheckpointError(path, f"{MANIFEST_NAME} is not a manifest of gptrain")


def _is_manifest(manifest: object) -> bool:
    """Return whether a value that was read from JSON is a manifest with all of its entries."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return False
    if any(type(manifest.get(key)) is not kind for key, kind in ENTRIES.items()):
        return False
    are_numbers = all(
        isinstance(value, int | float | None) for value in manifest["metrics"].values()
    )
    are_files = all(
        FILE_NAME.fullmatch(name)
        and isinstance(entry, dict)
        and [type(entry.get(key)) for key in ("bytes", "sha256")] == [int, str]
        for name, entry in manifest["files"].items()
    )
    return 0 <= manifest["step"] < 2**63 and are_numbers and are_files


def read_manifest(path: Path) -> dict:
    """Return the manifest of a checkpoint, or raise a DamagedCheckpointError."""
    with _damage(path, MANIFEST_NAME):
        return parse(read_bytes(path / MANIFEST_NAME), path)


def verify(path: Path, run_id: str | None = None) -> Checkpoint:
    """Read and check every byte of a checkpoint, of the run `run_id` if given, with a progress bar.

    Raises:
        DamagedCheckpointError: If the checkpoint is damaged or of another run.
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
        checks = [pool.submit(_check, path, name, entries[name], bar.update) for name in entries]
        for check in checks:
            check.result()
    return Checkpoint(path, manifest)


def _check(folder: Path, name: str, entry: dict, on_piece: Callable[[int], object]) -> None:
    """Raise a DamagedCheckpointError if a file differs from its entry in the manifest."""
    digest = hashlib.sha256()
    with _damage(folder, name), open_regular(folder / name) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes != entry["bytes"]:
            reason = f"{name} has {n_bytes} bytes, its manifest lists {entry['bytes']}"
            raise DamagedCheckpointError(folder, reason)
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            on_piece(len(piece))
    if digest.hexdigest() != entry["sha256"]:
        raise DamagedCheckpointError(folder, f"{name} is damaged (sha256)")


@contextmanager
def _damage(path: Path, name: str) -> Generator[None, None, None]:
    """Turn errors of reading a file of a checkpoint into a DamagedCheckpointError.

    If a network file system does not answer, the error passes, because the file may be intact.
    """
    try:
        yield
    except (OSError, UnreadableFileError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ANSWER:
            raise
        reason = error.strerror if isinstance(error, OSError) else error.reason
        raise DamagedCheckpointError(path, f"{name} cannot be read: {reason}") from None


class CheckpointStore:
    """The checkpoints of one run, all in one folder.

    Args:
        folder: Folder of the checkpoints. The first save creates it.
        run_id: Identity of the run, which is written into every manifest. Checkpoints of another
            run are refused. With None the store reads checkpoints of any run and cannot write.

    Attributes:
        on_commit: Function that rank 0 calls after each new checkpoint and after `set_metrics`.
    """

    def __init__(self, folder: str | Path, run_id: str | None = None) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.on_commit: Callable[[], object] = lambda: None
        self._unfinished: Save | None = None  # the save in the background

    # Saving

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        rest: Any,
        *,
        config: dict | None = None,
        metrics: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        """Save a new checkpoint. A checkpoint of the same step is replaced.

        All ranks of the job must call this method. An earlier save in the background is finished
        first. A save in the background becomes a checkpoint when `finish` is called.

        Args:
            step: Number of optimizer steps that are done.
            tensors: MODEL or OPTIMIZER -> name -> tensor or shard of this rank.
            rest: Value for torch.save with everything else, which rank 0 writes.
            config: Entries of the manifest that describe the run. Defaults to {}.
            metrics: Metrics for the manifest. Defaults to {}.
            options: `rank`, `gather` and `in_background` of `Save`.

        Raises:
            SaveFailedError: If a file operation failed on any rank. All ranks raise the same error.
            ValueError: If the store has no `run_id`.
        """
        from gptrain.checkpoints.save import Save

        self.finish()
        if self.run_id is None:
            raise ValueError("a store without run_id can only read")
        manifest = {"run_id": self.run_id, "step": step, "config": config or {}}
        manifest["metrics"] = metrics or {}
        draft = self.folder / f".draft-{folder_name(step)}"
        self._unfinished = Save(draft, manifest, tensors, rest, **options)
        if not options.get("in_background"):
            self.finish()

    @property
    def is_unfinished(self) -> bool:
        """True if a save in the background still needs a call of `finish`. Equal on all ranks."""
        return self._unfinished is not None

    @property
    def is_written(self) -> bool:
        """True if this rank has written its files of a save in the background."""
        return self._unfinished is not None and not self._unfinished.is_writing

    def finish(self) -> None:
        """Turn the save in the background, if any, into a checkpoint. Collective, as `save`."""
        if self._unfinished is None:
            return
        save, self._unfinished = self._unfinished, None
        save.finish(lambda: self._commit(save.folder))
        if save.rank == 0:
            self.on_commit()

    def _commit(self, draft: Path) -> None:
        """Rename the complete folder of a save to a checkpoint."""
        target = self.folder / draft.name.removeprefix(".draft-")
        # If this process is killed between the two renames, `clean` renames the draft.
        old = self._to_trash(target) if target.exists() else None
        try:
            os.rename(draft, target)
        except OSError:
            if old is not None:
                os.rename(old, target)
            raise
        files.sync_folder(self.folder)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def set_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a validation into the manifest of its step, if it was saved.

        Call it on rank 0 only. Raises a DamagedCheckpointError, or a SaveFailedError.
        """
        if self._unfinished is not None and self._unfinished.manifest["step"] == step:
            self._unfinished.manifest["metrics"] = metrics
        elif (path := self.folder / folder_name(step)).exists():
            text = seal(read_manifest(path) | {"metrics": metrics})
            try:
                files.replace(path / MANIFEST_NAME, text)
            except OSError as error:
                raise files.SaveFailedError(error.errno, str(self.folder)) from error
            self.on_commit()

    # Loading

    def paths(self) -> list[Path]:
        """Return the folders of all checkpoints, verified or not, in the order of their steps."""
        # Path.glob would take a folder that cannot be read for an empty one.
        names = os.listdir(self.folder) if self.folder.exists() else []
        names = sorted(filter(STEP_NAME.fullmatch, names), key=lambda name: int(name[5:]))
        return [self.folder / name for name in names]

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, verified or not, in ascending order."""
        return [int(path.name[5:]) for path in self.paths()]

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint, unverified, or None. Use it for messages."""
        return next(reversed(self.paths()), None)

    def newest_intact(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact, or None if nothing was ever saved.

        Newer damaged checkpoints are logged as warnings and, if the store has a `run_id`, renamed
        to `*.corrupt`. Call it on one rank, and with a `run_id` under the run lock.

        Raises:
            DamagedCheckpointError: If all checkpoints are, or were found, damaged.
            OldFormatError: If an old version of gptrain has written the newest one.
            OSError: If the network file system does not answer.
        """
        damaged = []
        for path in reversed(self.paths()):
            try:
                checkpoint = verify(path, self.run_id)
            except OldFormatError:
                raise
            except DamagedCheckpointError as error:
                damaged.append(error)
                continue
            for error in damaged:
                _log.warning("warning: %s; %s", error, self._set_aside(error.path))
            return checkpoint
        for path in sorted(self.folder.glob("step-*.corrupt*")):
            damaged.append(DamagedCheckpointError(path, "was found damaged earlier"))
        if damaged:
            reasons = "; ".join(f"{error.path.name}: {error.reason}" for error in damaged)
            raise DamagedCheckpointError(self.folder, f"no checkpoint is intact: {reasons}")
        return None

    def ranking(self, monitor: str, mode: str = "min") -> list[Path]:
        """Return the folders of the checkpoints that have a metric, unverified, the best one first.

        The best value is the lowest with the mode "min", the highest with "max"; of equal ones the
        earliest step.
        """
        sign = {"min": 1, "max": -1}[mode]
        scored = []
        for path in self.paths():
            with suppress(DamagedCheckpointError):
                value = read_manifest(path)["metrics"].get(monitor)
                if value is not None:
                    scored.append((sign * value, path))
        return [path for _, path in sorted(scored)]

    def best(self, monitor: str, mode: str = "min") -> Checkpoint | None:
        """Return the first intact checkpoint of `ranking`, or None. Damaged ones are warnings."""
        for path in self.ranking(monitor, mode):
            try:
                return verify(path, self.run_id)
            except DamagedCheckpointError as error:
                _log.warning("warning: %s; not used as the best checkpoint", error)
        return None

    # Housekeeping

    def prune(self, keep: int, protect: Collection[Path] = ()) -> None:
        """Remove all checkpoints except the newest `keep` and the protected ones, on one rank.

        A checkpoint that cannot be removed stays, and the next call tries again.
        """
        for path in self.paths()[:-keep]:
            if path not in protect:
                with suppress(OSError):
                    shutil.rmtree(self._to_trash(path), ignore_errors=True)

    def clean(self) -> None:
        """Remove the hidden folders that killed processes left. Call it under the run lock.

        A save that was complete becomes a checkpoint, unless the earlier one of its step is there.
        """
        for path in sorted(self.folder.glob(".*-step-*")):
            target = self.folder / path.name.removeprefix(".draft-")  # else the path itself
            if path.is_symlink():
                path.unlink()
            elif (path / MANIFEST_NAME).exists() and not target.exists():
                self._commit(path)
            else:
                shutil.rmtree(path)

    def _set_aside(self, path: Path) -> str:
        """Rename a damaged checkpoint to `*.corrupt`, and return what was done, for the log."""
        if self.run_id is None:
            return "an older checkpoint is used"
        n_before = len(list(self.folder.glob(f"{path.name}.corrupt*")))
        aside = f"{path.name}.corrupt" + (f"-{n_before + 1}" if n_before else "")
        os.rename(path, self.folder / aside)
        return f"set aside as {aside}"

    def _to_trash(self, path: Path) -> Path:
        """Hide a checkpoint in a folder that `clean` removes, and return that folder."""
        trash = self.folder / f".trash-{path.name}"
        shutil.rmtree(trash, ignore_errors=True)  # a killed start may have left it
        os.rename(path, trash)
        return trash
