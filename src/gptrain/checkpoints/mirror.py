"""A copy of a run's checkpoints in another folder or in an object store.

    mirror = Mirror("s3://bucket/runs/a")
    mirror.update(store)  # after each commit; the copy is made while training continues
    mirror.restore(store)  # if the run folder was lost

An object store has no rename. The manifest of a copy is therefore written last, and removed first
when a step is saved again: a folder without a manifest is not a checkpoint. Keys of an object store
may contain any "..", so only the files that a manifest names are copied back, and verified. Only
steps that the run has passed and pruned are removed: a run that resumes from an old image of its
disk leaves newer copies in place until it reaches their steps.
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
from gptrain.checkpoints.manifest import MANIFEST_NAME, DamagedCheckpointError, folder_name
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core.errors import (
    BAD_DATA,
    DONE,
    FOLDER_UNUSABLE,
    ConfigError,
    ConfigIssue,
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
            message, code = first_line(error), code_of(error)
            raise ConfigError.of("checkpoint.mirror", self.url, message, code=code) from error
        if run_id not in ("", lock.run_id):
            about = "checkpoint.mirror", self.url, "holds another run"
            hint = "ckpt_path=last in a new run_dir to go on with that"
            raise ConfigError.of(*about, hint=hint, code=FOLDER_UNUSABLE)

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
        """Copy every checkpoint of the mirror that is whole into the store.

        A damaged copy is reported and not used. Its manifest is removed, unless all copies are
        damaged: without a manifest the copy counts as unfinished, and the run writes all of its
        files again when it saves this step again. A run on a CPU may save the very same bytes.

        Raises:
            OSError: If the mirror cannot be read, or the store cannot be written.
            ConfigError: If there are copies and all of them are damaged. The user must decide.
        """
        store.folder.mkdir(exist_ok=True)
        damaged = {}
        for step in self._steps():
            name = folder_name(step)
            draft = store.folder / f".draft-{name}"  # the store removes or replaces drafts
            try:
                self._get(name, draft)
                manifest.verify(draft, store.run_id)
                os.rename(draft, store.folder / name)
            except FileNotFoundError:  # the copy was not finished, or is partly removed
                continue
            except DamagedCheckpointError as error:
                damaged[name] = error.reason
        fileops.sync_folder(store.folder)
        if damaged and not store.steps():
            reasons = "; ".join(f"{name}: {reason}" for name, reason in damaged.items())
            message = f"none of its checkpoints is whole: {reasons}"
            raise ConfigError.of("checkpoint.mirror", self.url, message, code=BAD_DATA)
        for name, reason in damaged.items():
            with suppress(OSError):  # the mirror may be read-only
                self.files.rm_file(f"{self.root}/{name}/{MANIFEST_NAME}")
            _log.warning("warning: %s/%s: %s; not used", self.url, name, reason)

    def _copy(self, store: CheckpointStore) -> None:
        try:
            for step in reversed(store.steps()):
                with suppress(FileNotFoundError, DamagedCheckpointError):  # pruned meanwhile
                    self._put(store.folder / folder_name(step))
            kept = store.steps()
            for step in self._steps():
                if kept and step < kept[-1] and step not in kept:
                    self.files.rm(f"{self.root}/{folder_name(step)}", recursive=True)
        except Exception as error:  # of a package that we do not know; the run itself is well
            message = f"not up to date: {first_line(error)}; the run's own checkpoints are whole"
            _log.warning("%s", ConfigIssue("checkpoint.mirror", self.url, message, code=DONE).line)

    def _put(self, source: Path) -> None:
        """Copy the files of a checkpoint that the mirror does not have yet, and its manifest."""
        target = f"{self.root}/{source.name}"
        text = read_bytes(source / MANIFEST_NAME)
        copied: dict[str, dict] = {}
        with suppress(FileNotFoundError, DamagedCheckpointError):
            there = self._manifest(source.name)
            if there == text:
                return
            self.files.rm_file(f"{target}/{MANIFEST_NAME}")
            copied = manifest.parse(there, source)["files"]
        self.files.makedirs(target, exist_ok=True)
        for file, entry in manifest.parse(text, source)["files"].items():
            if copied.get(file) != entry:
                self.files.put_file(str(source / file), f"{target}/{file}")
        # Write the manifest as it was read. If the step was saved again, the next update sees it.
        self.files.pipe_file(f"{target}/{MANIFEST_NAME}", text)

    def _get(self, name: str, draft: Path) -> None:
        """Brings the files of a copy, and no others, into a new folder."""
        fileops.remove_tree(draft)
        text = self._manifest(name)
        draft.mkdir()
        for file in manifest.parse(text, draft)["files"]:
            self.files.get_file(f"{self.root}/{name}/{file}", str(draft / file))
        fileops.write_new_file(draft / MANIFEST_NAME, text)

    def _run_id(self) -> str:
        """Of the run whose checkpoints are there, "" where there are none."""
        for step in self._steps():
            name = folder_name(step)
            with suppress(FileNotFoundError, DamagedCheckpointError):  # never finished
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
