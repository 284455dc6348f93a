"""Checkpoints that are complete or do not exist.

A save goes to `.draft-step-00000500` beside its target: files, each hashed and synced; the
manifest; the folder's names; then one rename to `step-00000500` and a sync of the parent. Killed at
any point it leaves the earlier checkpoints and a draft that nobody reads. Loading takes the highest
step of which every byte verifies.

A step that is saved before its validation gets one file more afterwards (`amend`): the file takes
its name in the folder, and then a new manifest, which lists it, replaces the old one.

Three more names, none of which is ever loaded: `step-00000500.corrupt` (failed verification; kept
for a person to look at), `.old-step-00000500` (being replaced by a second save of the same step)
and `.trash-step-00000500` (being removed: a folder half removed must not look like a damaged one).
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from gptrain.checkpoints import fileops, manifest
from gptrain.checkpoints.manifest import (
    Checkpoint,
    DamagedCheckpointError,
    NoGoodCheckpointError,
    folder_name,
)
from gptrain.checkpoints.writer import CheckpointWriter, SaveFailedError, free_bytes

_log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run, all in one folder.

    Args:
        run_id: written into every manifest; a checkpoint of another run is refused. None takes
            checkpoints of any run and cannot write.
        progress: a heartbeat's `beat`: called bare while bytes are written or read back.

    Attributes:
        on_commit: called after each new checkpoint, on rank 0.
    """

    def __init__(
        self,
        folder: str | Path,
        run_id: str | None = None,
        progress: Callable[..., None] | None = None,
    ) -> None:
        self.folder, self.run_id, self.progress = Path(folder), run_id, progress
        self.on_commit: Callable[[], object] = lambda: None
        self._unfinished: tuple[CheckpointWriter, dict] | None = (
            None  # in the background, and its manifest
        )

    # Saving

    @contextmanager
    def writing(
        self,
        step: int,
        *,
        kind: str = "full",
        config: dict | None = None,
        metrics: dict[str, float] | None = None,
        needed_bytes: int = 0,
        rank: int = 0,
        gather: Callable[[object], list] = lambda value: [value],
        in_background: bool = False,
    ) -> Generator[CheckpointWriter, None, None]:
        """A draft to write files into; a checkpoint once the block ends without an exception.

            with store.writing(500) as draft, draft.open("state.ckpt") as file:
                torch.save(state, file)

        In a sharded save all ranks enter it; each writes files of its own names.

        Args:
            needed_bytes: expected size, checked against the free space before anything is written.
            gather: see `CheckpointWriter`.
            in_background: the files are written while the caller goes on; a checkpoint only once
                `finish` was called.
        Raises: SaveFailedError, the same on every rank, for whatever the file system refused.
        """
        self.finish()
        if self.run_id is None:
            raise ValueError("a store without run_id is for reading only")
        draft = CheckpointWriter(
            self._hidden("draft", step), rank, gather, needed_bytes, self.progress
        )
        with draft.same_error_on_all_ranks():
            if rank == 0:
                self.check_space(needed_bytes)
                if not self.folder.exists():
                    os.mkdir(self.folder)
                    fileops.sync_folder(self.folder.parent)
                fileops.remove_tree(draft.path)  # of a save that failed and could not be removed
                os.mkdir(draft.path)
        with draft.same_error_on_all_ranks():
            yield draft
        about = {"step": step, "kind": kind, "config": config or {}, "metrics": metrics or {}}
        self._unfinished = draft, about
        draft.write(in_background)
        if not in_background:
            self.finish()

    @property
    def is_unfinished(self) -> bool:
        """Whether a save in the background waits for `finish`; the same on all ranks."""
        return self._unfinished is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes it."""
        return self._unfinished is not None and self._unfinished[0].is_writing

    def finish(self) -> None:
        """Waits for the save in the background and makes a checkpoint of it; all ranks call it.

        Raises: SaveFailedError, on all ranks alike.
        """
        if self._unfinished is None:
            return
        (draft, about), self._unfinished = self._unfinished, None
        files_of_ranks = draft.finish()
        with draft.same_error_on_all_ranks():
            if draft.rank == 0:
                self._commit(draft.path, about, files_of_ranks)
        if draft.rank == 0:
            self.on_commit()

    def amend(
        self,
        step: int,
        files: Mapping[str, bytes],
        metrics: dict[str, float],
        *,
        rank: int = 0,
        gather: Callable[[object], list] = lambda value: [value],
    ) -> None:
        """Add files, and metrics, to the newest checkpoint of this store; all ranks call it.

        Where that save is still in the background they become part of it.

        Args:
            files: Name -> content of this rank's files; must not be among those of the checkpoint.
            gather: see `CheckpointWriter`.

        Raises: SaveFailedError, on all ranks alike, with the checkpoint as it was.
        """
        if self._unfinished is not None:
            draft, about = self._unfinished
            about["metrics"] = metrics
        else:
            draft, about = (
                CheckpointWriter(self._hidden("draft", step), rank, gather, 0, self.progress),
                None,
            )
            with draft.same_error_on_all_ranks():
                if rank == 0:
                    fileops.remove_tree(draft.path)
                    os.mkdir(draft.path)
        for name, content in files.items():
            with draft.open(name) as file:
                file.write(content)
        draft.write(in_background=about is not None)
        if about is not None:
            return
        files_of_ranks = draft.finish()
        with draft.same_error_on_all_ranks():
            if rank == 0:
                self._commit_amendment(draft.path, step, metrics, files_of_ranks)
        if rank == 0:
            self.on_commit()

    def check_space(self, needed_bytes: int) -> None:
        """Raises SaveFailedError unless the folder's file system has that many bytes left."""
        if (free := free_bytes(self.folder)) < needed_bytes:
            raise SaveFailedError(errno.ENOSPC, self.folder, needed_bytes, free, rank=0)

    # Loading

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are here, verified or not, in order."""
        # Not by glob, to which a folder that cannot be read is an empty one.
        names = os.listdir(self.folder) if self.folder.exists() else []
        found = map(manifest.STEP_NAME.fullmatch, names)
        return sorted(int(name[1]) for name in found if name)

    def newest(self) -> Path | None:
        """The newest checkpoint's folder, not verified: for messages, not for loading."""
        steps = self.steps()
        return self.folder / folder_name(steps[-1]) if steps else None

    def verify(self, path: Path) -> Checkpoint:
        """The checkpoint, read from disk and found whole. Raises: DamagedCheckpointError."""
        return Checkpoint(path, manifest.verify(path, self.run_id))

    def newest_good(self) -> Checkpoint | None:
        """The highest step that verifies, None if nothing was ever saved here.

        Damaged ones that are newer are renamed to `*.corrupt`, once there is a good one to go on
        from; but a store without run_id leaves all as it is. Call it on one rank, with a run_id
        under the run lock.

        Raises: NoGoodCheckpointError if there are checkpoints and all are damaged, or were found
        so by
            an earlier start.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                found = self.verify(self.folder / folder_name(step))
            except DamagedCheckpointError as error:
                damaged.append(error)
                continue
            for error in damaged:
                _log.warning("warning: %s; %s", error, self._set_aside(error.path))
            return found
        for path in sorted(self.folder.glob("step-*.corrupt*")):
            damaged.append(DamagedCheckpointError(path, "found damaged before"))
        if damaged:
            raise NoGoodCheckpointError(self.folder, damaged)
        return None

    def ranking(self, monitor: str, mode: str = "min") -> list[Path]:
        """Folders of the checkpoints that have a metric, the lowest (`max`: highest) first.

        Of equal ones the earlier; not verified: for what may be removed, and for messages.
        """
        sign, scored = {"min": 1, "max": -1}[mode], []
        for step in self.steps():
            path = self.folder / folder_name(step)
            with suppress(DamagedCheckpointError):
                if (value := manifest.read_manifest(path)["metrics"].get(monitor)) is not None:
                    scored.append((sign * value, step, path))
        return [path for _, _, path in sorted(scored)]

    def best(self, monitor: str, mode: str = "min") -> Checkpoint | None:
        """The first of the ranking that is whole, None if there is none."""
        for path in self.ranking(monitor, mode):
            try:
                return self.verify(path)
            except DamagedCheckpointError as error:
                _log.warning("warning: %s; it is not taken as the best", error)
        return None

    # Housekeeping

    def prune(self, keep: int, protect: Collection[Path] = ()) -> None:
        """Removes all but the newest `keep` checkpoints and the protected."""
        for step in self.steps()[:-keep]:
            path, trash = self.folder / folder_name(step), self._hidden("trash", step)
            if path in protect:
                continue
            shutil.rmtree(trash, ignore_errors=True)  # of a start that was killed meanwhile
            if _rename(path, trash):
                shutil.rmtree(trash, ignore_errors=True)  # what is left goes at the next `clean`

    def clean(self) -> None:
        """Removes what dead writers left; call it under the run lock, at the start.

        A checkpoint that was being replaced comes back if its replacement did not arrive.
        """
        for path in sorted(self.folder.glob(".*-step-*")):
            kind, _, name = path.name.removeprefix(".").partition("-")
            if kind == "old" and not (self.folder / name).exists():
                os.rename(path, self.folder / name)
            elif kind in ("old", "draft", "trash"):
                fileops.remove_tree(path)

    def _commit(self, draft: Path, about: dict, files_of_ranks: list[dict[str, dict]]) -> None:
        """Makes a checkpoint of a draft; one of the same step is replaced."""
        entries = sorted(entry for files in files_of_ranks for entry in files.items())
        about |= {"run_id": self.run_id, "world_size": len(files_of_ranks), "files": dict(entries)}
        target, old = self.folder / folder_name(about["step"]), self._hidden("old", about["step"])
        fileops.write_new_file(draft / manifest.MANIFEST_NAME, manifest.seal(about))
        fileops.sync_folder(draft)
        if target.exists():
            os.rename(target, old)
        os.rename(draft, target)
        fileops.sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _commit_amendment(
        self, draft: Path, step: int, metrics: dict, files_of_ranks: list[dict[str, dict]]
    ) -> None:
        """Move a draft's files into the step's checkpoint, then replace its manifest."""
        target = self.folder / folder_name(step)
        about, entries = manifest.read_manifest(target), {}
        for files in files_of_ranks:
            entries |= files
        for name in entries:
            os.rename(draft / name, target / name)
        fileops.sync_folder(target)
        about |= {"metrics": metrics, "files": dict(sorted((about["files"] | entries).items()))}
        fileops.replace(target / manifest.MANIFEST_NAME, manifest.seal(about))
        fileops.remove_tree(draft)

    def _set_aside(self, path: Path) -> str:
        """What became of a damaged checkpoint."""
        n_before = len(list(self.folder.glob(f"{path.name}.corrupt*")))
        aside = f"{path.name}.corrupt" + (f"-{n_before + 1}" if n_before else "")
        is_aside = self.run_id is not None and _rename(path, self.folder / aside)
        return f"set aside as {aside}" if is_aside else "an older one is taken"

    def _hidden(self, kind: str, step: int) -> Path:
        return self.folder / f".{kind}-{folder_name(step)}"


def _rename(path: Path, to: Path) -> bool:
    """Whether it could be put away; no run ends because it could not, in a read-only folder say."""
    try:
        os.rename(path, to)
    except OSError as error:
        _log.warning("warning: %s: cannot be renamed to %s: %s", path, to.name, error.strerror)
        return False
    return True
