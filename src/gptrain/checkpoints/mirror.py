"""Mirror: a copy of a run's checkpoints in another folder or in an object store.

An object store has no rename. So the manifest of a copy is written last, and it is removed first
when a step is saved again: a folder without a manifest is not a checkpoint. Keys of an object store
may contain "..", so only the files that a manifest lists are copied back, and then verified. A copy
is removed only when the run has passed its step and pruned the original, or has gone back before
it. A run that resumes from an old image of its disk, or because newer originals are damaged, keeps
newer copies until it reaches their steps.
"""

import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fsspec.core import url_to_fs

from gptrain.checkpoints import files
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import (
    MANIFEST_NAME,
    STEP_NAME,
    DamagedCheckpointError,
    parse,
    verify,
)
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import errors
from gptrain.core.errors import ConfigError
from gptrain.core.small_files import read_bytes

_log = logging.getLogger(__name__)


class Mirror:
    """Copy of a run's checkpoints in a folder on any file system or object store of fsspec.

    Args:
        url: Folder for the checkpoints of this run only: /path, file:///path or s3://bucket/path.

    Raises:
        ValueError: If the protocol is unknown, or its package is missing.
    """

    def __init__(self, url: str):
        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except ImportError as error:  # the message names the package to install
            raise ValueError(error) from error
        self._thread = ThreadPoolExecutor(1, "mirror")
        self._newest: Future[None] | None = None  # update that began or waits last

    def join(self, store: CheckpointStore, lock: RunLock, restore: bool) -> None:
        """Check that the mirror is empty or belongs to this run, or restore a lost run from it.

        Call it on rank 0, under the run lock, before the run uses the store. With `restore` the
        store must be empty: it gets the intact checkpoints of the mirror, if there are any, and
        `lock` and `store` get the identity of their run.

        Raises:
            ConfigError: If the mirror holds another run, has only damaged checkpoints to restore,
                or if reading it or writing the copies fails with an OSError.
        """
        try:
            run_id = self._run_id() or lock.run_id
            if restore:
                lock.adopt(run_id)
                store.run_id = run_id
                self.restore(store)
        except OSError as error:
            raise self._error(errors.first_line(error), errors.code_of(error)) from error
        if run_id != lock.run_id:
            hint = "ckpt_path=last in a new run_dir to resume that run"
            raise self._error("holds another run", errors.FOLDER_UNUSABLE, hint)

    def update(self, store: CheckpointStore) -> Future[None]:
        """Copy new checkpoints and remove the copies of pruned ones, in a thread, on rank 0.

        Returns at once. Updates run one after the other, and one that has not begun serves several
        calls. `result()` of the returned Future waits for the end of the update; it raises nothing,
        because errors are logged as warnings.
        """
        newest = self._newest
        if newest is None or newest.running() or newest.done():  # else it copies what is new now
            self._newest = newest = self._thread.submit(self._copy, store)
        return newest

    def restore(self, store: CheckpointStore) -> None:
        """Copy every intact checkpoint of the mirror into the store, which has none.

        A damaged copy is logged as a warning, and its manifest in the mirror is removed, so that
        the run copies this step again. If all copies are damaged, nothing is removed, and a
        ConfigError is raised.
        """
        store.folder.mkdir(exist_ok=True)
        damaged = []
        for name in self._names():
            draft = store.folder / f".copy-{name}"  # `store.clean` removes a draft that is left
            shutil.rmtree(draft, ignore_errors=True)
            try:
                text = self._manifest(name)
                draft.mkdir()
                for file in parse(text, draft)["files"]:
                    self.files.get_file(f"{self.root}/{name}/{file}", str(draft / file))
                files.replace(draft / MANIFEST_NAME, text)
                verify(draft, store.run_id)
                os.rename(draft, store.folder / name)
            except FileNotFoundError:  # the copy was not finished, or is partly removed
                continue
            except DamagedCheckpointError as error:
                damaged.append(name)
                _log.warning("warning: %s/%s: %s; not used", self.url, name, error.reason)
        files.sync_folder(store.folder)
        if damaged and not store.steps():
            raise self._error("all of its checkpoints are damaged", errors.BAD_DATA)
        for name in damaged:
            with suppress(OSError):  # the mirror may be read-only
                self.files.rm_file(f"{self.root}/{name}/{MANIFEST_NAME}")

    def _error(self, message: str, code: int, hint: str = "") -> ConfigError:
        """Return an error about the mirror."""
        return ConfigError.of("checkpoint.mirror", self.url, message, hint=hint, code=code)

    def _copy(self, store: CheckpointStore) -> None:
        """Copy new checkpoints, the newest first, and remove copies of pruned ones, in a thread."""
        try:
            for path in reversed(store.paths()):
                # The run may prune a checkpoint meanwhile.
                with suppress(FileNotFoundError, DamagedCheckpointError):
                    self._put(path)
            kept = [path.name for path in store.paths()]
            left = {path.name.partition(".")[0] for path in store.folder.glob("step-*.unused-*")}
            for name in self._names():
                if name not in kept and (name in left or name < max(kept, default="")):
                    self.files.rm(f"{self.root}/{name}", recursive=True)
        except Exception as error:  # fsspec's packages raise exceptions of any type
            text = "warning: checkpoint.mirror=%s: not up to date: %s; own checkpoints are intact"
            _log.warning(text, self.url, errors.first_line(error))

    def _put(self, source: Path) -> None:
        """Copy a checkpoint to the mirror: its files, then the manifest.

        An older manifest is removed before a file is copied. One that lists the same files is only
        replaced, so that new metrics do not make the copy incomplete.
        """
        target = f"{self.root}/{source.name}"
        text = read_bytes(source / MANIFEST_NAME)
        entries = parse(text, source)["files"]
        old_text, copied = b"", None
        with suppress(FileNotFoundError, DamagedCheckpointError):
            old_text = self._manifest(source.name)
            copied = parse(old_text, source)["files"]
        if copied != entries:
            if old_text:
                self.files.rm_file(f"{target}/{MANIFEST_NAME}")
            self.files.makedirs(target, exist_ok=True)
            for file in entries:
                self.files.put_file(str(source / file), f"{target}/{file}")
        # Write the manifest as it was read. If the step was saved again, the next update sees it.
        if text != old_text:
            self.files.pipe_file(f"{target}/{MANIFEST_NAME}", text)

    def _run_id(self) -> str:
        """Return the identity of the run in the mirror, or "" if it has no complete checkpoint."""
        for name in self._names():
            with suppress(FileNotFoundError, DamagedCheckpointError):  # the copy was not finished
                return parse(self._manifest(name), Path(name))["run_id"]
        return ""

    def _manifest(self, name: str) -> bytes:
        """Return the text of the manifest of a copy. Raises a FileNotFoundError without one."""
        return self.files.cat_file(f"{self.root}/{name}/{MANIFEST_NAME}")

    def _names(self) -> list[str]:
        """Return the folders of all copies, complete or not, the newest first."""
        self.files.invalidate_cache()
        names: list[str] = []
        with suppress(FileNotFoundError):  # `exists` would also be False if the store is away
            names = [Path(path).name for path in self.files.ls(self.root, detail=False)]
        return sorted(filter(STEP_NAME.fullmatch, names), reverse=True)
