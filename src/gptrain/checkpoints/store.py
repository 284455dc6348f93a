"""CheckpointStore: the checkpoints of one run, each of which is complete or does not exist.

A save writes into the hidden folder `.draft-step-00000500`: first the files, each hashed and
synced, then the manifest. The folder is synced, renamed to `step-00000500`, and its parent is
synced. A process that is killed at any point leaves the earlier checkpoints. Loading takes the
highest step of which every byte is verified. A step is saved before its validation, and
`set_metrics` adds the metrics afterwards.

`step-00000500.damaged-*` could not be verified, and before `.unused-*` the run has gone back. They
are never removed. A checkpoint that is removed, or copied from a mirror and not verified yet, has a
hidden name, too.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptrain.checkpoints import files, manifest
from gptrain.checkpoints.manifest import MANIFEST_NAME, DamagedCheckpointError, hidden, step_of

if TYPE_CHECKING:  # save.py imports torch, which takes seconds; many stores only read
    from gptrain.checkpoints.save import Save, Tensors

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, all in one folder.

    Args:
        folder: Folder of the checkpoints. The first save creates it.
        run_id: Identity of the run, which is written into every manifest. Checkpoints of another
            run count as damaged. With None the store reads checkpoints of any run and cannot save.
        ranks: `rank` and `gather` of `Save`, for a store into which several ranks save.

    Attributes:
        on_commit: Function that rank 0 calls after each new checkpoint and after `set_metrics`.
        unfinished: Save in the background that still needs a call of `finish`, or None.
    """

    def __init__(self, folder: str | Path, run_id: str | None = None, **ranks: Any) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.ranks = ranks
        self.on_commit: Callable[[], object] = lambda: None
        self.unfinished: Save | None = None

    # Saving

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensors],
        rest: Any,
        in_background: bool = False,
        **about: Any,
    ) -> None:
        """Save a new checkpoint.

        All ranks of the job must call this method. An earlier save in the background is finished
        first. A save in the background becomes a checkpoint when `finish` is called.

        Args:
            step: Number of optimizer steps that are done.
            tensors: MODEL or OPTIMIZER -> name -> tensor, or DTensor with the shard of this rank.
            rest: Value for torch.save with everything else, which rank 0 writes.
            in_background: Whether to return before the files are written.
            about: Entries `config` and `phase_s` of the manifest.

        Raises:
            SaveFailedError: On all ranks, if a file operation failed on any. Earlier checkpoints
                are intact.
            RuntimeError: In the same way, for any other error, as a `rest` that cannot be pickled.
            ValueError: If the store has no `run_id`.
        """
        from gptrain.checkpoints.save import Save

        self.finish()
        described = manifest.Manifest.model_validate({"run_id": self.run_id, "step": step, **about})
        save = Save(self.folder / manifest.folder_name(step), described, **self.ranks)
        save.begin(tensors, rest, in_background)
        self.unfinished = save
        if not in_background:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in the background, if there is one, and make it a checkpoint.

        Collective. Raises as `save`.
        """
        if (save := self.unfinished) is not None:
            self.unfinished = None
            save.finish()
            if save.rank == 0:
                self.on_commit()

    def set_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Write the metrics of a validation into the manifest of its step, if it was saved.

        They replace earlier metrics of the step. Call it on rank 0 only. Raises a
        DamagedCheckpointError or an OSError if the manifest cannot be read or written.
        """
        if self.unfinished is not None and self.unfinished.manifest.step == step:
            self.unfinished.manifest.metrics = metrics
        elif (path := self.folder / manifest.folder_name(step)).exists():
            described = manifest.read_manifest(path)
            described.metrics = metrics
            files.replace(path / MANIFEST_NAME, manifest.seal(described.model_dump()))
            self.on_commit()

    # Loading

    def paths(self) -> list[Path]:
        """Return the folders of all checkpoints, unverified, in ascending order of their steps.

        The list is empty if the folder does not exist. Raises an OSError if it cannot be read.
        """
        # Path.glob would take a folder that cannot be read for an empty one.
        names = os.listdir(self.folder) if self.folder.exists() else []
        paths = (self.folder / name for name in filter(manifest.STEP_NAME.fullmatch, names))
        return sorted(paths, key=step_of)

    def newest(self) -> Path | None:
        """Return the folder of the newest checkpoint, or None. It may be damaged."""
        return next(reversed(self.paths()), None)

    def newest_intact(self) -> Path | None:
        """Return the folder of the newest intact checkpoint, or None if nothing was ever saved.

        Newer damaged checkpoints are logged as warnings.

        Raises:
            DamagedCheckpointError: If all checkpoints are damaged.
            OSError: If the network file system does not answer.
        """
        return self._first_intact(reversed(self.paths()))

    def ranking(self, monitor: str, mode: str = "min") -> list[Path]:
        """Return the folders of the checkpoints, unverified, in the order of a metric, best first.

        `monitor` is its logged name. The best value is the lowest with the mode "min", the highest
        with "max". Checkpoints without the metric, with NaN or with a damaged manifest are left
        out.
        """
        sign = {"min": 1, "max": -1}[mode]
        values = {}
        for path in self.paths():
            with suppress(DamagedCheckpointError):
                values[path] = manifest.read_manifest(path).metrics.get(monitor)
        known = {path: sign * value for path, value in values.items() if value is not None}
        return sorted(known, key=known.__getitem__)

    def best(self, monitor: str, mode: str = "min") -> Path | None:
        """Return the folder of the first intact checkpoint of `ranking`, or None if that is empty.

        Better but damaged checkpoints are logged as warnings. Raises as `newest_intact`.
        """
        return self._first_intact(self.ranking(monitor, mode))

    def _first_intact(self, paths: Iterable[Path]) -> Path | None:
        """Return the first checkpoint that is intact, or None if there are no paths."""
        damaged = None
        for path in paths:
            try:
                manifest.verify(path, self.run_id)
                return path
            except DamagedCheckpointError as error:
                _log.warning("warning: passed over: %s", error)
                damaged = error
        if damaged is not None:
            reason = f"no checkpoint is intact: {damaged.path.name}: {damaged.reason}"
            raise DamagedCheckpointError(self.folder, reason)
        return None

    # Housekeeping

    def set_aside_after(self, step: int, why: str = "unused") -> None:
        """Rename the checkpoints of later steps, on rank 0, when a run continues from `step`.

        They are "damaged", or the run has gone back before them: they must not count as the newest
        ones. Nothing removes the renamed folders. A mirror keeps the copies of damaged ones.
        """
        for path in self.paths():
            if step_of(path) > step:
                aside = path.with_suffix(f".{why}-{time.time_ns()}")
                os.rename(path, aside)
                _log.warning("warning: %s set aside as %s", path, aside.name)

    def prune(self, keep: int, protect: Collection[Path] = ()) -> None:
        """Remove all checkpoints except the newest `keep`, at least 1, and the folders `protect`.

        Call it on rank 0 only. `protect` has paths of this store, as `paths` returns them. A
        checkpoint that cannot be removed stays, without an error.
        """
        for path in self.paths()[:-keep]:
            if path not in protect:
                with suppress(OSError):
                    os.rename(path, hidden(path))
                    shutil.rmtree(hidden(path), ignore_errors=True)

    def clean(self) -> None:
        """Remove the hidden folders that killed processes left. Call it under the run lock.

        What cannot be removed stays, without an error, as a symbolic link.
        """
        for path in self.folder.glob(".*-step-*"):
            shutil.rmtree(path, ignore_errors=True)
