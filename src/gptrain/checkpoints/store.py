"""CheckpointStore: a folder of checkpoints, each of which is complete or does not exist.

A save writes into the hidden folder `.draft-step-00000500`: first the files, each hashed and
synced, then the manifest. The folder is synced, renamed to `step-00000500`, and its parent is
synced. A process that is killed at any point leaves the earlier checkpoints and a draft that is
never loaded. Loading takes the highest step of which every byte is verified.

A step is saved before its validation. Its metrics are known afterwards, and a new manifest that has
them replaces the old one (`set_metrics`).

Folders with three more kinds of names are never loaded either:
`step-00000500.corrupt` failed its verification and is kept for the user to look at.
`.old-step-00000500` is being replaced by a second save of the same step.
`.trash-step-00000500` is being removed: a half removed folder must not look like a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptrain.checkpoints import fileops, manifest
from gptrain.checkpoints.fileops import Gather, SaveFailedError, free_bytes, save_failed
from gptrain.checkpoints.manifest import (
    AllDamagedError,
    Checkpoint,
    DamagedCheckpointError,
    OldFormatError,
    folder_name,
)

if TYPE_CHECKING:  # these modules import torch, which takes seconds; many stores only read
    from gptrain.checkpoints.shards import Tensors
    from gptrain.checkpoints.writer import Save

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, all in one folder.

    Args:
        folder: Folder of the checkpoints. The first save creates it.
        run_id: Identity of the run, which is written into every manifest. Checkpoints of another
            run are refused. With None the store reads checkpoints of any run and cannot write.
        progress: Function that reports progress, such as `Guard.beat`. The store calls it
            without arguments while bytes are written or read back.

    Attributes:
        on_commit: Function that rank 0 calls after each new checkpoint and after `set_metrics`.
    """

    def __init__(
        self,
        folder: str | Path,
        run_id: str | None = None,
        progress: Callable[..., None] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.progress = progress
        self.on_commit: Callable[[], object] = lambda: None
        # The save in the background, and the entries of its manifest.
        self._unfinished: tuple[Save, dict] | None = None

    # Saving

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        rest: Any,
        *,
        config: dict | None = None,
        metrics: dict[str, float] | None = None,
        needed_bytes: int = 0,
        rank: int = 0,
        gather: Gather = lambda value: [value],
        in_background: bool = False,
    ) -> None:
        """Save a new checkpoint. A checkpoint of the same step is replaced.

        All ranks of the job must call this method. An earlier save in the background is finished
        first.

        Args:
            step: Number of optimizer steps that are done.
            tensors: MODEL or OPTIMIZER -> name -> tensor or shard of this rank.
            rest: Value for torch.save with everything else, which rank 0 writes.
            config: Entries of the manifest that describe the run. Defaults to {}.
            metrics: Metrics for the manifest. Defaults to {}.
            needed_bytes: Expected size of the checkpoint, over all ranks. Rank 0 checks before
                anything is written that this space is free.
            rank: Global rank of this process.
            gather: Collective function that returns one value of each rank on all ranks.
            in_background: Whether a thread writes copies of the tensors, while the caller
                continues. They become a checkpoint when `finish` is called.

        Raises:
            SaveFailedError: If a file operation failed on any rank. All ranks raise the same error.
            ValueError: If the store has no `run_id`.
        """
        from gptrain.checkpoints.writer import Save

        self.finish()
        if self.run_id is None:
            raise ValueError("a store without run_id can only read")
        save = Save(
            self._hidden("draft", step),
            tensors,
            rest,
            rank=rank,
            gather=gather,
            needed_bytes=needed_bytes,
            in_background=in_background,
            progress=self.progress,
        )
        entries = {"run_id": self.run_id, "step": step, "config": config or {}}
        self._unfinished = save, entries | {"metrics": metrics or {}}
        if not in_background:
            self.finish()

    @property
    def is_unfinished(self) -> bool:
        """True if a save in the background still needs a call of `finish`. Equal on all ranks."""
        return self._unfinished is not None

    @property
    def is_written(self) -> bool:
        """True if this rank has written its files of a save in the background."""
        return self._unfinished is not None and not self._unfinished[0].is_writing

    def finish(self) -> None:
        """Wait for the save in the background, and turn its files into a checkpoint.

        All ranks must call this method. It does nothing if there is no such save.

        Raises:
            SaveFailedError: If a file operation failed on any rank. All ranks raise the same error.
        """
        if self._unfinished is None:
            return
        save, entries = self._unfinished
        self._unfinished = None
        files = save.finish()
        save.on_all_ranks(lambda: self._commit(save.folder, entries | {"files": files}, save.rank))
        if save.rank == 0:
            self.on_commit()

    def set_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a validation into the manifest of the checkpoint of its step.

        Call it on rank 0 only. If the checkpoint is still being saved in the background, its
        manifest gets the metrics when it is written. Does nothing if there is no such checkpoint.

        Raises:
            DamagedCheckpointError: If the manifest is damaged.
            SaveFailedError: If the manifest cannot be written. The old one is unchanged then.
        """
        if self._unfinished is not None and self._unfinished[1]["step"] == step:
            self._unfinished[1]["metrics"] = metrics
        elif step in self.steps():
            path = self.folder / folder_name(step)
            entries = manifest.read_manifest(path) | {"metrics": metrics}
            text = manifest.seal(entries)
            try:
                fileops.replace(path / manifest.MANIFEST_NAME, text)
            except OSError as error:
                raise save_failed(error, self.folder, len(text), rank=0) from error
            self.on_commit()

    def check_space(self, needed_bytes: int) -> None:
        """Check that the file system of the checkpoints has enough free space. Quotas are ignored.

        Args:
            needed_bytes: Expected size of the next checkpoint, over all ranks.

        Raises:
            SaveFailedError: If fewer than `needed_bytes` bytes are free.
            OSError: If the parent of the checkpoints' folder does not exist.
        """
        free = free_bytes(self.folder)
        if free < needed_bytes:
            raise SaveFailedError(errno.ENOSPC, self.folder, needed_bytes, free, rank=0)

    # Loading

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, verified or not, in ascending order.

        Raises:
            OSError: If the folder exists and cannot be read.
        """
        # Path.glob would take a folder that cannot be read for an empty one.
        names = os.listdir(self.folder) if self.folder.exists() else []
        matches = map(manifest.STEP_NAME.fullmatch, names)
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> Path | None:
        """Return the folder of the checkpoint with the highest step, or None if there is none.

        The checkpoint is not verified. Use the result for messages only.

        Raises:
            OSError: If the folder of the checkpoints exists and cannot be read.
        """
        steps = self.steps()
        return self.folder / folder_name(steps[-1]) if steps else None

    def verify(self, path: Path) -> Checkpoint:
        """Read every byte of a checkpoint, compare it with its manifest, and return the checkpoint.

        Args:
            path: Folder of the checkpoint.

        Raises:
            DamagedCheckpointError: If the checkpoint is damaged, or belongs to another run than the
                `run_id` of the store.
            OSError: If the network file system does not answer.
        """
        return Checkpoint(path, manifest.verify(path, self.run_id))

    def newest_intact(self) -> Checkpoint | None:
        """Return the newest checkpoint that is intact, or None if nothing was ever saved.

        Every byte of it is verified. Newer damaged checkpoints are logged as warnings and, if the
        store has a `run_id`, renamed to `*.corrupt` once an intact one was found. Call it on one
        rank, and with a `run_id` under the run lock.

        Raises:
            AllDamagedError: If there are checkpoints, but all are damaged or were found damaged by
                an earlier start.
            OSError: If the network file system does not answer.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                checkpoint = self.verify(self.folder / folder_name(step))
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
            raise AllDamagedError(self.folder, damaged)
        return None

    def ranking(self, monitor: str, mode: str = "min") -> list[Path]:
        """Return the folders of the checkpoints that have a metric, the best value first.

        Of equal values the earlier step comes first. The checkpoints are not verified. Those
        without a readable manifest are left out.

        Args:
            monitor: Name of the metric.
            mode: "min" if the lowest value is the best, "max" if the highest is.

        Raises:
            OSError: If the folder cannot be read, or the network file system does not answer.
        """
        sign = {"min": 1, "max": -1}[mode]
        scored = []
        for step in self.steps():
            path = self.folder / folder_name(step)
            with suppress(DamagedCheckpointError):
                value = manifest.read_manifest(path)["metrics"].get(monitor)
                if value is not None:
                    scored.append((sign * value, step, path))
        return [path for _, _, path in sorted(scored)]

    def best(self, monitor: str, mode: str = "min") -> Checkpoint | None:
        """Return the intact checkpoint with the best value of a metric, or None if there is none.

        A damaged checkpoint is reported as a warning and not used. Of equal values the earliest
        step counts.

        Args:
            monitor: Name of the metric.
            mode: "min" if the lowest value is the best, "max" if the highest is.

        Raises:
            OSError: If the folder cannot be read, or the network file system does not answer.
        """
        for path in self.ranking(monitor, mode):
            try:
                return self.verify(path)
            except DamagedCheckpointError as error:
                _log.warning("warning: %s; not used as the best checkpoint", error)
        return None

    # Housekeeping

    def prune(self, keep: int, protect: Collection[Path] = ()) -> None:
        """Remove all checkpoints except the newest `keep` and the protected ones.

        A checkpoint that cannot be renamed for its removal stays, with a warning in the log. Call
        it on one rank only.

        Args:
            keep: Number of newest checkpoints that stay, at least 1.
            protect: Folders of more checkpoints that stay. They do not count in `keep`.

        Raises:
            OSError: If the folder of the checkpoints exists and cannot be read.
        """
        for step in self.steps()[:-keep]:
            path = self.folder / folder_name(step)
            if path in protect:
                continue
            trash = self._hidden("trash", step)
            shutil.rmtree(trash, ignore_errors=True)  # a killed start may have left it
            if _rename(path, trash):
                shutil.rmtree(trash, ignore_errors=True)  # `clean` removes the rest

    def clean(self) -> None:
        """Remove the hidden folders that killed processes left. Call it under the run lock.

        A checkpoint that was being replaced is restored if its replacement was not completed.

        Raises:
            OSError: If a folder cannot be removed or renamed.
        """
        for path in sorted(self.folder.glob(".*-step-*")):
            kind, _, name = path.name.removeprefix(".").partition("-")
            if kind == "old" and not (self.folder / name).exists():
                os.rename(path, self.folder / name)
            elif kind in ("old", "draft", "trash"):
                fileops.remove_tree(path)

    def _commit(self, draft: Path, entries: dict, rank: int) -> None:
        """Turn the hidden folder of a save into a checkpoint: write the manifest, then rename it.

        A checkpoint of the same step is replaced. Does nothing on other ranks than 0.

        Args:
            draft: Hidden folder with all files.
            entries: Entries of the manifest.
            rank: Global rank of this process.

        Raises:
            OSError: If the manifest cannot be written, or a folder cannot be renamed.
        """
        if rank != 0:
            return
        target = self.folder / folder_name(entries["step"])
        old = self._hidden("old", entries["step"])
        fileops.write_new_file(draft / manifest.MANIFEST_NAME, [manifest.seal(entries)])
        fileops.sync_folder(draft)
        if target.exists():
            # Until the next line, a reader without the lock sees the step before this one. `clean`
            # reverses the renaming if this process is killed here.
            os.rename(target, old)
        os.rename(draft, target)
        fileops.sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _set_aside(self, path: Path) -> str:
        """Rename a damaged checkpoint to `*.corrupt`, and return what was done, for the log.

        Without a `run_id` the store only reads, and renames nothing.

        Args:
            path: Folder of the damaged checkpoint.
        """
        n_before = len(list(self.folder.glob(f"{path.name}.corrupt*")))
        name = f"{path.name}.corrupt" + (f"-{n_before + 1}" if n_before else "")
        is_renamed = self.run_id is not None and _rename(path, self.folder / name)
        return f"set aside as {name}" if is_renamed else "an older checkpoint is used"

    def _hidden(self, kind: str, step: int) -> Path:
        """Return the path of a hidden folder of the store, such as `.draft-step-00000500`.

        Args:
            kind: "draft" for a save that is not complete, "old" for a checkpoint that is being
                replaced, or "trash" for one that is being removed.
            step: Step of the checkpoint.
        """
        return self.folder / f".{kind}-{folder_name(step)}"


def _rename(path: Path, to: Path) -> bool:
    """Rename a folder and return whether that succeeded. A failure is logged as a warning.

    Args:
        path: Folder.
        to: New path, in the same folder.
    """
    try:
        os.rename(path, to)
    except OSError as error:
        _log.warning("warning: %s: cannot be renamed to %s: %s", path, to.name, error.strerror)
        return False
    return True


def save_folder(
    path: Path, tensors: Mapping[str, Tensors], rest: Any, rank: int, gather: Gather
) -> None:
    """Save a checkpoint into a folder that belongs to no store. All ranks must call it.

    Args:
        path: New folder. An existing folder of this name is replaced.
        tensors: MODEL or OPTIMIZER -> name -> tensor or shard of this rank.
        rest: Value for torch.save with the key `global_step`.
        rank: Global rank of this process.
        gather: Collective function that returns one value of each rank on all ranks.

    Raises:
        SaveFailedError: On all ranks, if a file operation failed on any rank.
    """
    from gptrain.checkpoints.writer import Save

    about = {"needed_bytes": 0, "in_background": False, "progress": None}
    save = Save(path, tensors, rest, rank=rank, gather=gather, **about)
    entries = {"run_id": "", "step": rest["global_step"], "config": {}, "metrics": {}}
    text = manifest.seal(entries | {"files": save.finish()})
    if rank == 0:
        fileops.write_new_file(path / manifest.MANIFEST_NAME, [text])
