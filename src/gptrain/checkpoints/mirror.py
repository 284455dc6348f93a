"""Mirror: a copy of a run's checkpoints in another folder or in an object store.

An object store has no rename. So the manifest of a copy is written last, and it is removed first
when a step is saved again: a folder without a manifest is not a checkpoint. Keys of an object store
may contain "..", so only the files that a manifest lists are copied back. A copy is removed only
when the run has passed its step and pruned the original, or has gone back before it. A run that
resumes from an old image of its disk, or because newer originals are damaged, keeps newer copies
until it reaches their steps.
"""

import glob
import logging
import os
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
        ConfigError: If the protocol is unknown, or its package is missing.
    """

    def __init__(self, url: str):
        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except (ImportError, ValueError) as error:  # the message names the package to install
            raise self._error(str(error), errors.BAD_CONFIG) from error
        self._thread = ThreadPoolExecutor(1, "mirror")

    def join(self, store: CheckpointStore, lock: RunLock, restore: bool) -> None:
        """Check that the mirror is empty or belongs to this run, or restore a lost run from it.

        Call it on rank 0, under the run lock, after `store.clean`. With `restore` the store must be
        empty: it gets the checkpoints of the mirror, if there are any (`restore`), and `lock` and
        `store` get the identity of their run.

        Raises:
            ConfigError: If the mirror holds another run, or if reading it or writing the copies
                fails with an OSError.
            DamagedCheckpointError: If all checkpoints to restore are damaged.
        """
        try:
            run_id = self._owner(lock.run_id)
            if restore:
                lock.adopt(run_id)
                store.run_id = run_id
                self.restore(store)
        except OSError as error:
            raise self._error(errors.first_line(error), errors.code_of(error)) from error
        if run_id != lock.run_id:
            hint = "ckpt_path=last in a new run_dir to resume that run"
            raise self._error("holds another run", errors.FOLDER_UNUSABLE, hint)

    def restore(self, store: CheckpointStore) -> None:
        """Copy all checkpoints of the mirror into the store, which has none, and verify the newest.

        Newer checkpoints that are damaged are set aside as unused: the next update removes their
        copies, so that the run copies these steps again. Raises a DamagedCheckpointError if all are
        damaged.
        """
        texts = {name: text for name in self._names() if (text := self._manifest(name))}
        for name, text in texts.items():
            draft = hidden(store.folder / name)
            draft.mkdir(parents=True)
            with suppress(DamagedCheckpointError, FileNotFoundError):  # `verify` will miss it
                for file in parse(text, draft).files:
                    self.files.get_file(f"{self.root}/{name}/{file}", str(draft / file))
            files.replace(draft / MANIFEST_NAME, text)
        # A restore that is cut off must leave the store empty, or the next start would not copy the
        # others, and would remove their copies as those of checkpoints that it has pruned.
        for name in reversed(texts):
            os.rename(hidden(store.folder / name), store.folder / name)
            files.sync_folder(store.folder)
        if newest := store.newest_intact():
            store.set_aside_after(manifest.step_of(newest))

    def update(self, store: CheckpointStore) -> Future[None]:
        """Copy new checkpoints and remove the copies of pruned ones, in a thread, on rank 0.

        Returns at once. Updates run one after the other. `result()` of the returned Future waits
        for the end of the update; it raises nothing, because errors are logged as warnings.
        """
        return self._thread.submit(self._update, store)

    def _update(self, store: CheckpointStore) -> None:
        """Copy new checkpoints, the newest first, and remove copies of pruned ones, in a thread."""
        try:
            # Two runs may have begun with the same empty mirror.
            if self._owner(store.run_id or "") != store.run_id:
                raise OSError("holds another run")
            for path in reversed(store.paths()):
                # The run may prune a checkpoint meanwhile.
                with suppress(DamagedCheckpointError, FileNotFoundError):
                    self._put(path)
            kept = [path.name for path in store.paths()]
            left = {path.name.partition(".")[0] for path in store.folder.glob("step-*.unused-*")}
            for name in self._names():
                if name not in kept and (name in left or name < max(kept, default="")):
                    # `rm` reads a path as a pattern, except that of a local folder.
                    escape = str if "file" in self.files.protocol else glob.escape
                    self.files.rm(escape(f"{self.root}/{name}"), recursive=True)
        except Exception as error:  # fsspec's packages raise exceptions of any type
            text = "warning: checkpoint.mirror=%s: not up to date: %s; own checkpoints are intact"
            _log.warning(text, self.url, errors.first_line(error))

    def _put(self, source: Path) -> None:
        """Copy a checkpoint to the mirror, unless it has a complete copy of the same files.

        The manifest of an older copy is removed before a file is copied. New metrics replace it
        and do not make the copy incomplete.
        """
        target, copied = f"{self.root}/{source.name}", None
        current, text = manifest.read_manifest(source), self._manifest(source.name)
        with suppress(DamagedCheckpointError):
            copied = parse(text, source)
        if copied is None or copied.files != current.files:
            if text:
                self.files.rm_file(f"{target}/{MANIFEST_NAME}")
            self.files.makedirs(target, exist_ok=True)
            for file in current.files:
                self.files.put_file(str(source / file), f"{target}/{file}")
        # Write the manifest as it was read. If the step was saved again, the next update sees it.
        if copied != current:
            self.files.pipe_file(f"{target}/{MANIFEST_NAME}", manifest.seal(current.model_dump()))

    def _error(self, message: str, code: int, hint: str = "") -> errors.ConfigError:
        """Return an error about the mirror."""
        return errors.ConfigError.of("checkpoint.mirror", self.url, message, hint=hint, code=code)

    def _names(self) -> list[str]:
        """Return the names of the folders of copies, complete or not, the newest first."""
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):  # `exists` would also be False if the store is away
            names = [Path(path).name for path in self.files.ls(self.root, detail=False)]
            return sorted(filter(manifest.STEP_NAME.fullmatch, names), reverse=True)
        return []

    def _manifest(self, name: str) -> bytes:
        """Return the text of the manifest of a copy, or b"" without one."""
        path = f"{self.root}/{name}/{MANIFEST_NAME}"
        with suppress(FileNotFoundError):  # opening a named pipe would wait for a writer
            return self.files.cat_file(path) if self.files.info(path)["type"] == "file" else b""
        return b""

    def _owner(self, run_id: str) -> str:
        """Return the identity of the run whose copies the mirror holds, `run_id` without any."""
        for name in reversed(self._names()):
            with suppress(DamagedCheckpointError):
                return parse(self._manifest(name), Path(name)).run_id
        return run_id
