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

from gptrain.checkpoints import files, manifest
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import MANIFEST_NAME, DamagedCheckpointError, hidden, parse
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import errors

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

    def join(self, store: CheckpointStore, lock: RunLock, restore: bool) -> None:
        """Check that the mirror is empty or belongs to this run, or restore a lost run from it.

        Call it on rank 0, under the run lock, before the run uses the store. With `restore` the
        store must be empty: it gets the intact checkpoints of the mirror, if there are any, and
        `lock` and `store` get the identity of their run.

        Raises:
            ConfigError: If the mirror holds another run, has only damaged checkpoints to restore,
                or if reading it or writing the copies fails with an OSError.
        """
        run_id = lock.run_id
        try:
            for name, text in self._copies().items():
                with suppress(DamagedCheckpointError):
                    run_id = parse(text, Path(name)).run_id
                    break
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

        Returns at once. Updates run one after the other. `result()` of the returned Future waits
        for the end of the update; it raises nothing, because errors are logged as warnings.
        """
        return self._thread.submit(self._update, store)

    def restore(self, store: CheckpointStore) -> None:
        """Copy every intact checkpoint of the mirror into the store, which has none.

        A damaged copy is logged as a warning, and its manifest in the mirror is removed, so that
        the run copies this step again. If all copies are damaged, nothing is removed, and a
        ConfigError is raised.
        """
        store.folder.mkdir(exist_ok=True)
        copies = {name: text for name, text in self._copies().items() if text}
        for name, text in copies.items():
            draft = hidden(store.folder / name)
            shutil.rmtree(draft, ignore_errors=True)
            try:
                draft.mkdir()
                for file in parse(text, draft).files:
                    with suppress(FileNotFoundError):  # `verify` will miss it
                        self.files.get_file(f"{self.root}/{name}/{file}", str(draft / file))
                files.replace(draft / MANIFEST_NAME, text)
                manifest.verify(draft, store.run_id)
                os.rename(draft, store.folder / name)
            except DamagedCheckpointError as error:
                _log.warning("warning: %s/%s: %s; not used", self.url, name, error.reason)
        files.sync_folder(store.folder)
        if copies and not store.steps():
            raise self._error("all of its checkpoints are damaged", errors.BAD_DATA)
        for name in copies.keys() - {path.name for path in store.paths()}:
            with suppress(OSError):  # the mirror may be read-only
                self.files.rm_file(f"{self.root}/{name}/{MANIFEST_NAME}")

    def _error(self, message: str, code: int, hint: str = "") -> errors.ConfigError:
        """Return an error about the mirror."""
        return errors.ConfigError.of("checkpoint.mirror", self.url, message, hint=hint, code=code)

    def _copies(self) -> dict[str, bytes]:
        """Return folder name -> manifest of the copies, or b"" without one, the newest first."""
        self.files.invalidate_cache()
        copies, names = {}, []
        with suppress(FileNotFoundError):  # `exists` would also be False if the store is away
            names = [Path(path).name for path in self.files.ls(self.root, detail=False)]
        for name in sorted(filter(manifest.STEP_NAME.fullmatch, names), reverse=True):
            copies[name] = b""
            with suppress(FileNotFoundError):
                copies[name] = self.files.cat_file(f"{self.root}/{name}/{MANIFEST_NAME}")
        return copies

    def _update(self, store: CheckpointStore) -> None:
        """Copy new checkpoints, the newest first, and remove copies of pruned ones, in a thread."""
        try:
            copies = self._copies()
            for path in reversed(store.paths()):
                # The run may prune a checkpoint meanwhile.
                with suppress(FileNotFoundError, DamagedCheckpointError):
                    self._put(path, copies.get(path.name, b""))
            kept = [path.name for path in store.paths()]
            left = {path.name.partition(".")[0] for path in store.folder.glob("step-*.unused-*")}
            for name in copies:
                if name not in kept and (name in left or name < max(kept, default="")):
                    self.files.rm(f"{self.root}/{name}", recursive=True)
        except Exception as error:  # fsspec's packages raise exceptions of any type
            text = "warning: checkpoint.mirror=%s: not up to date: %s; own checkpoints are intact"
            _log.warning(text, self.url, errors.first_line(error))

    def _put(self, source: Path, old_text: bytes) -> None:
        """Copy a checkpoint to the mirror, in which it has the manifest `old_text`, or none.

        An older manifest is removed before a file is copied. One that lists the same files is only
        replaced, so that new metrics do not make the copy incomplete.
        """
        target = f"{self.root}/{source.name}"
        current, copied = manifest.read_manifest(source), None
        with suppress(DamagedCheckpointError):
            copied = parse(old_text, source)
        if copied is None or copied.files != current.files:
            if old_text:
                self.files.rm_file(f"{target}/{MANIFEST_NAME}")
            self.files.makedirs(target, exist_ok=True)
            for file in current.files:
                self.files.put_file(str(source / file), f"{target}/{file}")
        # Write the manifest as it was read. If the step was saved again, the next update sees it.
        if copied != current:
            text = manifest.seal(current.model_dump())
            self.files.pipe_file(f"{target}/{MANIFEST_NAME}", text)
