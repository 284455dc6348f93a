"""A copy of a run's checkpoints elsewhere: in another folder, or in an object store.

    mirror = Mirror("s3://bucket/runs/a")
    mirror.update(store)  # after each commit; copies while steps go on
    mirror.restore(store)  # where the run folder is lost

An object store has no rename. So a copy's manifest is written last, and removed first where a step
is saved again: a folder without one is no checkpoint. What comes back is verified, and of a folder
there only the files come that its manifest names: keys of a store may have any ".." in them.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fsspec.core import url_to_fs

from gptrain.problems import BAD_DATA, DONE, ConfigError, Problem, code_of, first_line
from gptrain.resilience import fileops, manifest
from gptrain.resilience.manifest import MANIFEST_NAME, DamagedCheckpoint, folder_name
from gptrain.resilience.store import CheckpointStore
from gptrain.small_files import read_bytes

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

    def update(self, store: CheckpointStore) -> None:
        """Begins to make the mirror equal to the store; where it cannot, that is one warning."""
        if self._last is not None:
            self._last.cancel()  # unless it has begun: this one will see all
        self._last = self._thread.submit(self._copy, store)

    def wait(self) -> None:
        """Until the last update is done, or has failed."""
        if self._last is not None:
            self._last.result()

    def run_id(self) -> str:
        """Of the run whose checkpoints are there, "" where there are none.

        Raises: ConfigError where nothing can be read there.
        """
        try:
            for name in self._names():
                with suppress(FileNotFoundError, DamagedCheckpoint):  # never finished
                    return manifest.parse(self._manifest(name), Path(name))["run_id"]
        except OSError as error:
            about = "checkpoint.mirror", self.url, first_line(error)
            raise ConfigError.of(*about, code=code_of(error)) from error
        return ""

    def restore(self, store: CheckpointStore) -> None:
        """Brings every checkpoint that is whole back into the store.

        Raises: OSError; ConfigError where there are some, and none is whole: a person must decide.
        """
        store.folder.mkdir(exist_ok=True)
        damaged = False
        for name in self._names():
            draft = store.folder / f".draft-{name}"  # which the store removes, or replaces
            try:
                self._get(name, draft)
                manifest.verify(draft, run_id=store.run_id)
            except FileNotFoundError:  # never finished, or half removed
                continue
            except DamagedCheckpoint as error:
                _log.warning("warning: %s/%s is left there: %s", self.url, name, error)
                damaged = True
                continue
            os.rename(draft, store.folder / name)
            fileops.sync_folder(store.folder)
        if damaged and not store.steps():
            wrong = "none of its checkpoints is whole"
            raise ConfigError.of("checkpoint.mirror", self.url, wrong, code=BAD_DATA)

    def _copy(self, store: CheckpointStore) -> None:
        kept = [folder_name(step) for step in store.steps()]
        try:
            for name in kept:
                with suppress(FileNotFoundError, DamagedCheckpoint):  # pruned meanwhile
                    self._put(store.folder / name)
            for name in set(self._names()) - set(kept):
                self.files.rm(f"{self.root}/{name}", recursive=True)
        except Exception as error:  # of a package that we do not know; the run itself is well
            wrong = f"not up to date: {first_line(error)}; the run's own checkpoints are whole"
            _log.warning("%s", Problem("checkpoint.mirror", self.url, wrong, code=DONE).line)

    def _put(self, source: Path) -> None:
        """Copies a checkpoint, unless it is there as it is here."""
        target = f"{self.root}/{source.name}"
        text = read_bytes(source / MANIFEST_NAME, manifest.MAX_BYTES)
        with suppress(FileNotFoundError):
            if self._manifest(source.name) == text:
                return
            self.files.rm_file(f"{target}/{MANIFEST_NAME}")  # of this step before its validation
        self.files.makedirs(target, exist_ok=True)
        for file in manifest.parse(text, source)["files"]:
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

    def _manifest(self, name: str) -> bytes:
        """The text of a copy's manifest. Raises: FileNotFoundError; OSError."""
        return self.files.cat_file(f"{self.root}/{name}/{MANIFEST_NAME}", end=manifest.MAX_BYTES)

    def _names(self) -> list[str]:
        """Folders of steps that are there, complete or not, the newest first."""
        self.files.invalidate_cache()
        with suppress(FileNotFoundError):
            names = (Path(path).name for path in self.files.ls(self.root, detail=False))
            return sorted(filter(manifest.STEP_NAME.fullmatch, names), reverse=True)
        return []
