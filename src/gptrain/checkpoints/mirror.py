"""A copy of a run's checkpoints elsewhere: in another folder, or in an object store.

    mirror = Mirror("s3://bucket/runs/a")
    mirror.update(store)  # after each commit; copies while steps go on
    mirror.restore(store)  # where the run folder is lost

An object store has no rename. So a copy's manifest is written last, and removed first where a step
is saved again: a folder without one is no checkpoint. Of a folder there only the files come back
that its manifest names, verified: keys of a store may have any ".." in them. Removed are only steps
that the store has passed and pruned: a run that goes on from an old image of its disk leaves what
is newer, until it gets there itself.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fsspec.core import url_to_fs

from gptrain.checkpoints import fileops, manifest
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import MANIFEST_NAME, DamagedCheckpoint, folder_name
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.errors import (
    BAD_DATA,
    DONE,
    FOLDER_UNUSABLE,
    ConfigError,
    Problem,
    code_of,
    first_line,
)
from gptrain.core.small_files import read_bytes

_log = logging.getLogger(__name__)


class Mirror:
    """A run's checkpoints, wherever fsspec can write.

    Args:
        url: of a folder of this run alone: /path, file:///path, s3://bucket/path.

    Raises: ValueError for an unknown protocol, ImportError where its package is missing.
    """

    def __init__(self, url: str):
        self.url = url
        self.files, self.root = url_to_fs(url)
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._last: Future | None = None

    def join(self, store: CheckpointStore, lock: RunLock, restore: bool) -> None:
        """Makes sure that it is the mirror of the folder's run.

        Args:
            restore: the store is empty: the folder becomes that of the run that is in the mirror.

        Raises: ConfigError where it holds another run or no whole checkpoint, or cannot be used.
        """
        try:
            run_id = self._run_id()
            if restore:
                if run_id:
                    lock.adopt(run_id)
                    store.run_id = run_id
                self.restore(store)
        except OSError as error:
            wrong, code = first_line(error), code_of(error)
            raise ConfigError.of("checkpoint.mirror", self.url, wrong, code=code) from error
        if run_id not in ("", lock.run_id):
            about = "checkpoint.mirror", self.url, "holds another run"
            attempt = "ckpt_path=last in a new run_dir to go on with that"
            raise ConfigError.of(*about, attempt=attempt, code=FOLDER_UNUSABLE)

    def update(self, store: CheckpointStore) -> None:
        """Begins to make the mirror equal to the store; where it cannot, that is one warning."""
        if self._last is not None:
            self._last.cancel()  # unless it has begun: this one will see all
        self._last = self._thread.submit(self._copy, store)

    def wait(self) -> None:
        """Until the last update is done, or has failed."""
        if self._last is not None:
            self._last.result()

    def restore(self, store: CheckpointStore) -> None:
        """Brings every checkpoint that is whole back into the store; sets damaged ones aside.

        Raises: OSError; ConfigError where there are some, and none is whole: a person must decide.
        """
        store.folder.mkdir(exist_ok=True)
        damaged = {}
        for step in self._steps():
            name = folder_name(step)
            draft = store.folder / f".draft-{name}"  # which the store removes, or replaces
            try:
                self._get(name, draft)
                manifest.verify(draft, store.run_id)
                os.rename(draft, store.folder / name)
            except FileNotFoundError:  # never finished, or half removed
                continue
            except DamagedCheckpoint as error:
                damaged[name] = error.reason
        fileops.sync_folder(store.folder)
        if damaged and not store.steps():  # left as they are: the next start must stop, too
            reasons = "; ".join(f"{name}: {reason}" for name, reason in damaged.items())
            wrong = f"none of its checkpoints is whole: {reasons}"
            raise ConfigError.of("checkpoint.mirror", self.url, wrong, code=BAD_DATA)
        for name, reason in damaged.items():
            aside = f"{name}.corrupt"
            with suppress(OSError):  # read-only: nothing is removed there either
                self.files.mv(f"{self.root}/{name}", f"{self.root}/{aside}", recursive=True)
            _log.warning("warning: %s/%s: %s; kept as %s", self.url, name, reason, aside)

    def _copy(self, store: CheckpointStore) -> None:
        try:
            for step in reversed(store.steps()):
                with suppress(FileNotFoundError, DamagedCheckpoint):  # pruned meanwhile
                    self._put(store.folder / folder_name(step))
            kept = store.steps()
            for step in self._steps():
                if kept and step < kept[-1] and step not in kept:
                    self.files.rm(f"{self.root}/{folder_name(step)}", recursive=True)
        except Exception as error:  # of a package that we do not know; the run itself is well
            wrong = f"not up to date: {first_line(error)}; the run's own checkpoints are whole"
            _log.warning("%s", Problem("checkpoint.mirror", self.url, wrong, code=DONE).line)

    def _put(self, source: Path) -> None:
        """Copies a checkpoint, unless it is there as it is here."""
        target = f"{self.root}/{source.name}"
        text = read_bytes(source / MANIFEST_NAME)
        copied: dict[str, dict] = {}
        with suppress(FileNotFoundError, DamagedCheckpoint):
            there = self._manifest(source.name)
            if there == text:
                return
            self.files.rm_file(f"{target}/{MANIFEST_NAME}")  # of this step before its validation
            copied = manifest.parse(there, source)["files"]
        self.files.makedirs(target, exist_ok=True)
        for file, entry in manifest.parse(text, source)["files"].items():
            if copied.get(file) != entry:
                self.files.put_file(str(source / file), f"{target}/{file}")
        # As it was read: where the step was saved again meanwhile, the next update sees that.
        self.files.pipe_file(f"{target}/{MANIFEST_NAME}", text)

    def _get(self, name: str, draft: Path) -> None:
        """Brings the files of a copy, and no others, into a new folder."""
        fileops.remove_tree(draft)
        text = self._manifest(name)
        draft.mkdir()
        for file in manifest.parse(text, draft)["files"]:
            self.files.get_file(f"{self.root}/{name}/{file}", str(draft / file))
        fileops.write_whole(draft / MANIFEST_NAME, text)

    def _run_id(self) -> str:
        """Of the run whose checkpoints are there, "" where there are none."""
        for step in self._steps():
            name = folder_name(step)
            with suppress(FileNotFoundError, DamagedCheckpoint):  # never finished
                return manifest.parse(self._manifest(name), Path(name))["run_id"]
        return ""

    def _manifest(self, name: str) -> bytes:
        """The text of a copy's manifest. Raises: FileNotFoundError; OSError."""
        return self.files.cat_file(f"{self.root}/{name}/{MANIFEST_NAME}")

    def _steps(self) -> list[int]:
        """Steps that are there, complete or not, the newest first."""
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):
            names = (Path(path).name for path in self.files.ls(self.root, detail=False))
            found = map(manifest.STEP_NAME.fullmatch, names)
            return sorted((int(name[1]) for name in found if name), reverse=True)
        return []
