"""One save, from its first file to its name: on all ranks, in the foreground or the background.

The files of a save in the background are held in memory, which takes as long as a copy; a thread of
each rank puts them on the medium. The name is given on the main threads, by `finish`: collectives
are for them alone.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gptrain.resilience import fileops
from gptrain.resilience.draft import Draft, SaveFailed
from gptrain.resilience.manifest import MANIFEST_NAME


class Save:
    """What the ranks write together.

    Args:
        path: the draft, a hidden folder beside the target.
        gather: collects one picklable value of each rank on all ranks, in rank order; it is the
            barrier, too.
        needed_bytes: what to say of the size where nothing was written.
        progress: called while bytes are written; not where that is done in the background, which
            would hide that the training hangs.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        gather: Callable[[object], list],
        needed_bytes: int,
        progress: Callable[[], None] | None,
        in_background: bool,
    ) -> None:
        self.rank, self.gather, self.needed_bytes = rank, gather, needed_bytes
        self.draft = Draft(path, None if in_background else progress, held=in_background)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._failure: BaseException | None = None  # of the thread, other than a refused operation

    def start_writing(self) -> None:
        """Lets a thread write what is held."""
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread still is."""
        return self._thread.is_alive()

    def finish(self) -> list[dict[str, dict]]:
        """The entries of every rank's files, once all are on the medium. Raises: SaveFailed."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        with self.same_answer():
            if self.draft.error is not None:
                raise self.draft.error
        return self.gather(self.draft.files)

    def _write(self) -> None:
        try:
            self.draft.write_held()
        except BaseException as failure:
            self._failure = failure

    @contextmanager
    def same_answer(self) -> Iterator[None]:
        """Let all ranks raise the first rank's SaveFailed, so that none goes on or waits alone.

        Other exceptions pass: their rank is about to end the job, and a collective might not
        return.
        """
        mine, draft = None, self.draft
        try:
            yield
        except SaveFailed as error:
            mine = error
        except OSError as error:
            if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
                raise  # of the network, not of the file system
            needed = max(self.needed_bytes, draft.n_bytes)
            mine = SaveFailed(error.errno, draft.path.parent, needed, _free_bytes(draft), self.rank)
            mine.__cause__ = error
        for failure in self.gather(mine):
            if failure is not None:
                raise failure


def commit(draft: Path, target: Path, old: Path, manifest: bytes) -> None:
    """Makes a checkpoint of a draft; one of the same name is replaced, and comes back if not."""
    fileops.write_whole(draft / MANIFEST_NAME, manifest)
    fileops.sync_folder(draft)
    if target.exists():
        fileops.rename(target, old)
    try:
        fileops.rename(draft, target)
    except OSError:
        if old.exists():
            fileops.rename(old, target)
        raise
    fileops.sync_folder(target.parent)


def _free_bytes(draft: Draft) -> int | None:
    try:
        return fileops.free_bytes(draft.path.parent)
    except OSError:
        return None
