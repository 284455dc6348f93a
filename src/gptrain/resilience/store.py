"""Checkpoints that are whole or do not exist.

A save goes to `.draft-step-00000500` beside its target: files, each hashed and synced; the
manifest; the folder's names; then one rename to `step-00000500` and a sync of the parent. Killed at
any point it leaves the earlier checkpoints and a draft that nobody reads. Loading takes the highest
step of which every byte verifies.

Three more names, all invisible to loading: `step-00000500.corrupt` (failed verification; kept for a
person to look at), `.old-step-00000500` (being replaced by a second save of the same step) and
`.trash-step-00000500` (being removed: a folder half removed must not look like a damaged one).
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptrain.resilience import fileops
from gptrain.resilience.draft import Draft, NoSpace, same_answer
from gptrain.resilience.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    DamagedCheckpoint,
    NoGoodCheckpoint,
    folder_name,
    manifest_bytes,
    read_manifest,
    seal,
    verify,
)

_STEP = re.compile(r"step-(\d{8,})")
_log = logging.getLogger(__name__)


def _alone(value: object) -> list:
    return [value]


class CheckpointStore:
    """The checkpoints of one run, all in one folder.

    Args:
        run_id: written into every manifest; a checkpoint of another run is refused. None takes
            checkpoints of any run and cannot write.
        progress: called while bytes are written or verified, for a heartbeat.
    """

    def __init__(
        self,
        folder: str | Path,
        run_id: str | None = None,
        progress: Callable[[], None] | None = None,
    ) -> None:
        self.folder, self.run_id, self.progress = Path(folder), run_id, progress
        self._verified: set[str] = set()  # seals of the manifests whose files this process has read

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
        gather: Callable[[object], list] = _alone,
    ) -> Iterator[Draft]:
        """A draft to write files into; a checkpoint once the block ends without an exception.

            with store.writing(500) as draft, draft.open("state.ckpt") as file:
                torch.save(state, file)

        In a sharded save all ranks enter it; each writes files of its own names.

        Args:
            needed_bytes: expected size, checked against the free space before anything is written.
            gather: collects one picklable value of each rank on all ranks, in rank order
                (torch.distributed.all_gather_object); it is the barrier, too.
        Raises: SaveFailed, the same on every rank, for whatever the file system refused.
        """
        draft = Draft(self._hidden("draft", step), self.progress)
        with same_answer(draft, rank, gather, needed_bytes):
            if rank == 0:
                self._begin(draft, needed_bytes)
        try:
            with same_answer(draft, rank, gather, needed_bytes):
                yield draft
                if draft.error is not None:
                    raise draft.error
            shares = gather(draft.files)
            with same_answer(draft, rank, gather, needed_bytes):
                if rank == 0:
                    files = {name: entry for share in shares for name, entry in share.items()}
                    manifest = manifest_bytes(
                        run_id=self.run_id,
                        step=step,
                        kind=kind,
                        world_size=len(shares),
                        config=config or {},
                        metrics=metrics or {},
                        files=files,
                    )
                    self._commit(draft, step, manifest)
        except BaseException:
            if rank == 0:
                self._discard(draft.path)
            raise

    def check_space(self, needed_bytes: int) -> None:
        """Raise NoSpace unless the folder's file system has that many bytes left."""
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        free = fileops.free_bytes(folder)
        if free < needed_bytes:
            raise NoSpace(self.folder, needed_bytes, free)

    def annotate(self, path: Path, metrics: dict[str, float]) -> None:
        """Add what was measured after the save to its manifest, which is replaced as a whole."""
        manifest = read_manifest(path)
        text = seal(manifest | {"metrics": manifest["metrics"] | metrics})
        fileops.replace(path / MANIFEST_NAME, text)
        if manifest["sha256"] in self._verified:  # the files are the same
            self._verified.add(read_manifest(path)["sha256"])

    # Loading

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are here, verified or not, in order."""
        if not self.folder.is_dir():
            return []
        names = (_STEP.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def verify(self, path: Path) -> Checkpoint:
        """The checkpoint, read from disk and found whole. Raises: DamagedCheckpoint."""
        manifest = verify(path, run_id=self.run_id, progress=self.progress)
        self._verified.add(manifest["sha256"])
        return Checkpoint(path, manifest)

    def newest_good(self) -> Checkpoint | None:
        """The highest step that verifies, None if nothing was ever saved here.

        Damaged ones that are newer are renamed to `*.corrupt`, once there is a good one to go on
        from. Call it on one rank, under the run lock.

        Raises: NoGoodCheckpoint if there are checkpoints and all are damaged, or were found so by
            an earlier start.
        """
        damaged = []
        for step in reversed(self.steps()):
            try:
                found = self.verify(self.folder / folder_name(step))
            except DamagedCheckpoint as error:
                damaged.append(error)
                continue
            for error in damaged:
                self._set_aside(error)
            return Checkpoint(found.path, found.manifest, tuple(damaged))
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("step-*.corrupt*")):
                damaged.append(DamagedCheckpoint(path, "found damaged before"))
        if damaged:
            raise NoGoodCheckpoint(self.folder, damaged)
        return None

    def best(self, monitor: str, mode: str) -> Checkpoint | None:
        """The whole checkpoint with the lowest (mode min) or highest (max) metric, None if none.

        Of equal ones the earliest. Checkpoints saved before the metric was measured do not count.
        """
        sign = {"min": 1, "max": -1}[mode]
        scored = []
        for step in self.steps():
            path = self.folder / folder_name(step)
            try:
                value = read_manifest(path)["metrics"].get(monitor)
            except DamagedCheckpoint:
                continue
            if value is not None:
                scored.append((sign * value, step, path))
        for _, _, path in sorted(scored):
            try:
                return self.verify(path)
            except DamagedCheckpoint as error:
                _log.warning("%s; it is not taken as the best", error)
        return None

    # Housekeeping

    def prune(self, keep: int, protect: Collection[Path] = ()) -> list[Path]:
        """Remove all but the newest `keep` good checkpoints and the protected; says which went.

        The ones kept are read back first (once per process), so a checkpoint only ever makes room
        for newer ones that are known to be whole.

        Raises: ValueError if keep < 2: one file alone is one disk error from nothing.
        """
        if keep < 2:
            raise ValueError(f"keep={keep}: at least two checkpoints are kept")
        n_good, removed = 0, []
        for step in reversed(self.steps()):
            path = self.folder / folder_name(step)
            if n_good < keep:
                try:
                    if read_manifest(path)["sha256"] not in self._verified:
                        self.verify(path)
                    n_good += 1
                except DamagedCheckpoint as error:
                    self._set_aside(error)
            elif path not in protect:
                trash = self._hidden("trash", step)
                self._discard(trash)
                if self._rename(path, trash):
                    self._discard(trash)
                    removed.append(path)
        return removed

    def clean(self) -> list[Path]:
        """Remove what dead writers left, and says what; call it under the run lock, at the start.

        A checkpoint that was being replaced comes back if its replacement did not arrive.
        """
        left = sorted(self.folder.glob(".*-step-*")) if self.folder.is_dir() else []
        for path in left:
            kind, _, name = path.name.removeprefix(".").partition("-")
            if kind == "old" and not (self.folder / name).exists():
                fileops.rename(path, self.folder / name)
            elif kind in ("old", "draft", "trash"):
                fileops.remove_tree(path)
        return left

    def _begin(self, draft: Draft, needed_bytes: int) -> None:
        if self.run_id is None:
            raise ValueError("a store without run_id is for reading only")
        self.check_space(needed_bytes)
        missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
        for folder in reversed(missing):
            fileops.make_folder(folder)
            fileops.sync_folder(folder.parent)
        if draft.path.exists():  # of a save that failed and could not be removed
            fileops.remove_tree(draft.path)
        fileops.make_folder(draft.path)

    def _commit(self, draft: Draft, step: int, manifest: bytes) -> None:
        target, old = self.folder / folder_name(step), self._hidden("old", step)
        fileops.write_whole(draft.path / MANIFEST_NAME, manifest)
        fileops.sync_folder(draft.path)
        if target.exists():
            fileops.rename(target, old)
        try:
            fileops.rename(draft.path, target)
        except OSError:
            if old.exists():
                fileops.rename(old, target)
            raise
        fileops.sync_folder(self.folder)
        self._discard(old)

    def _discard(self, path: Path) -> None:
        """Remove a hidden folder; what cannot be removed now goes at the next `clean`."""
        try:
            if path.exists():
                fileops.remove_tree(path)
        except OSError as error:
            _log.warning("%s: cannot be removed now: %s", path, error.strerror)

    def _set_aside(self, error: DamagedCheckpoint) -> None:
        aside = error.path.with_name(f"{error.path.name}.corrupt")
        number = 1
        while aside.exists():
            number += 1
            aside = error.path.with_name(f"{error.path.name}.corrupt-{number}")
        if self._rename(error.path, aside):
            _log.warning("%s; set aside as %s", error, aside.name)

    def _rename(self, path: Path, target: Path) -> bool:
        """Housekeeping of a folder that may have turned read-only: a warning, not an end."""
        try:
            fileops.rename(path, target)
        except OSError as error:
            _log.warning("%s: cannot be renamed to %s: %s", path, target.name, error.strerror)
            return False
        return True

    def _hidden(self, kind: str, step: int) -> Path:
        return self.folder / f".{kind}-{folder_name(step)}"
