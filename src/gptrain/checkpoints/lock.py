"""Lock of a run folder: one process holds the folder, and one run writes into it.

The kernel frees the lock (`filelock`) when its holder dies, however it dies, and a forked data
worker does not hold it. The identity of the run is in a file of its own, which stays.
"""

import errno
import uuid
from pathlib import Path

from filelock import FileLock, Timeout

from gptrain.checkpoints import files
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError, code_of
from gptrain.core.small_files import UnreadableFileError, read_bytes

LOCK_NAME = ".lock"
ID_NAME = "run_id"
# Names that a run opens, or in which it makes files. It replaces all other files of its folder
# without opening them, so that a link in their place is harmless.
_OPENED = (LOCK_NAME, "train.log", ".hydra")
NAMED_AFTER_S = 1.0  # a dying holder has ended by then
LOST_HOST_S = 120.0  # an NFS server keeps a lost host's lock for its lease, in Linux 90 s


class RunLock:
    """Exclusive right of a process to write into a run folder. `with` acquires and releases it.

    Args:
        run_dir: Folder of the run. It need not exist.
        wait_s: Time that `with` waits for another process that holds the folder, in seconds.

    Attributes:
        run_id: Random identity of the run, also in each checkpoint. `with` sets it.
    """

    run_id: str

    def __init__(self, run_dir: str | Path, wait_s: float = NAMED_AFTER_S) -> None:
        self.run_dir = Path(run_dir)
        self._lock = FileLock(self.run_dir / LOCK_NAME, timeout=wait_s)

    def __enter__(self) -> "RunLock":
        """Lock the folder, read or create `run_id`, and return this lock.

        The folder is created if missing. Use it before any file of the run is opened, also before
        the log file.

        Raises:
            ConfigError: If the folder is held, cannot be written or contains a link in place of a
                file of the run (exit code 73), or for another disk error (74).
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if links := [name for name in _OPENED if (self.run_dir / name).is_symlink()]:
                raise NotADirectoryError(errno.ENOTDIR, f"{links[0]} is a link; remove it")
            self._lock.acquire()
            self.adopt(read_run_id(self.run_dir) or uuid.uuid4().hex)
        except OSError as error:
            self._lock.release()
            message, code = error.strerror or str(error), code_of(error)
            if isinstance(error, Timeout):
                message = "held by another process; wait for it, stop it, or choose another folder"
                code = FOLDER_UNUSABLE
            raise ConfigError.of("run_dir", self.run_dir, message, code=code) from error
        return self

    def adopt(self, run_id: str) -> None:
        """Change the identity of the run, `run_id`, also in the locked folder, or raise OSError."""
        self.run_id = run_id
        files.replace(self.run_dir / ID_NAME, run_id.encode())

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def read_run_id(run_dir: str | Path) -> str:
    """Return the identity of the run in a folder, or "" if no run has begun there.

    Raises an OSError if its file cannot be opened.
    """
    try:
        return read_bytes(Path(run_dir) / ID_NAME)[:64].decode(errors="replace").strip()
    except (FileNotFoundError, UnreadableFileError):
        return ""


def is_held(run_dir: str | Path) -> bool:
    """Return whether a live process holds the run folder, which is locked for an instant.

    False for a folder without a lock file, or with one that cannot be read.
    """
    path = Path(run_dir) / LOCK_NAME
    if not path.is_file():
        return False
    try:
        with FileLock(path, timeout=0):
            return False
    except OSError as error:
        return isinstance(error, Timeout)
