"""One run, one folder: which process holds the folder, and which run lives in it.

The lock is `flock` on `run_dir/.lock`. The kernel frees such a lock when its holder dies, however
it dies, so that nobody has to judge whether the process number in the file is still alive. The lock
belongs to the open file, which forked children inherit. Every forked child closes it at once:
otherwise a data worker that outlives a killed run would keep the folder locked. The file is never
removed, because a lock on a file that has lost its name excludes nobody.

The package filelock does not serve here. Its newest version for Python 3.10 (4.1) empties the file
when it takes the lock, and the file holds the identity of the run.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from pathlib import Path

from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError, code_of
from gptrain.core.small_files import UnreadableFileError, open_regular, read_json

LOCK_NAME = ".lock"
# Kinds of the files that a run opens, and of the folders in which it makes files. Every other name
# in the run folder is replaced as it is, a link itself.
_KINDS = {
    LOCK_NAME: Path.is_file, "train.log": Path.is_file,
    ".hydra": Path.is_dir, ".beats": Path.is_dir,
}  # fmt: skip
# A single write of this fixed length, below a disk's sector, is never torn and replaces the record.
_RECORD_BYTES = 512
NAMED_AFTER_S = 1.0  # a new holder writes its record within milliseconds; a dying one has left
LOST_HOST_S = 120.0  # an NFS server keeps a lost host's lock for its lease, in Linux 90 s


class RunLock:
    """The right to write into a run folder. Hold it as long as any process of the run lives.

    Args:
        wait_s: Time that a start waits for another process that holds the folder, in seconds.

    Attributes:
        run_id: Identity of the run in this folder, drawn by its first holder and kept by all later
            ones. Each checkpoint has it, so that a checkpoint of another run is recognized.
    """

    def __init__(self, run_dir: str | Path, wait_s: float = NAMED_AFTER_S) -> None:
        self.run_dir, self.wait_s = Path(run_dir), wait_s
        self.run_id = ""
        self._descriptor = -1

    def acquire(self) -> RunLock:
        """Take the folder, which is made if it does not exist.

        Call it before the first file of the run is opened, its log included.

        Raises:
            ConfigError: If another live process holds the folder, if a link or a file of another
                kind has a name that the run opens, or if the folder cannot be made or written.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._check_names()
            os.register_at_fork(after_in_child=self.release)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.run_dir / LOCK_NAME, flags, 0o644)
            self._lock()
            self.adopt(read_holder(self.run_dir).get("run_id") or uuid.uuid4().hex)
        except BaseException as error:  # Ctrl-C during the wait, too
            self.release()
            if not isinstance(error, OSError):
                raise
            about = "run_dir", self.run_dir, error.strerror or str(error)
            raise ConfigError.of(*about, code=code_of(error)) from error
        return self

    def adopt(self, run_id: str) -> None:
        """Record this process as the holder, and make this the folder of the run `run_id`."""
        self.run_id = run_id
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname()}
        text = json.dumps(holder | {"started": started}).encode()
        os.pwrite(self._descriptor, text.ljust(_RECORD_BYTES), 0)
        os.ftruncate(self._descriptor, _RECORD_BYTES)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Give the folder back. Does nothing the second time.

        In a forked child this closes the child's copy, and the parent keeps the folder.
        """
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check_names(self) -> None:
        """Refuse links and files of another kind, as an untrusted run folder may have them.

        `checkpoints` may be a link to another disk.
        """
        for name, is_ours in _KINDS.items():
            path = self.run_dir / name
            # In this order: another start may make the file between the two questions.
            if path.is_symlink() or (path.exists() and not is_ours(path)):
                what = "a link" if path.is_symlink() else "none that a run makes"
                raise _refused(path, f"{what}; remove it")

    def _lock(self) -> None:
        """Take the lock, or refuse the start when its time to wait is over."""
        end_s = time.monotonic() + self.wait_s
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end_s:
                    about = dict.fromkeys(("pid", "host", "started"), "unknown")
                    about |= read_holder(self.run_dir)
                    message = "held by process {pid} on {host} since {started}".format_map(about)
                    raise _refused(self.run_dir, f"{message}; wait for it, stop it") from None
                time.sleep(NAMED_AFTER_S)


def read_holder(run_dir: str | Path) -> dict:
    """Return the record of the last holder: run_id, pid, host, started. {} if there is none.

    The record of a past holder stays: only the lock tells whether any process holds the folder.

    Raises:
        OSError: If the file cannot be read.
    """
    try:
        holder = read_json(Path(run_dir) / LOCK_NAME)
    except (FileNotFoundError, UnreadableFileError):  # of another error no new run may begin
        return {}
    is_ours = isinstance(holder, dict) and isinstance(holder.get("run_id"), str)
    return holder if is_ours else {}


def is_held(run_dir: str | Path) -> bool:
    """Return whether a live process holds the run folder. Nothing is written.

    A start at the same moment may find the folder held by this probe, and asks once more.
    """
    try:
        with open_regular(Path(run_dir) / LOCK_NAME) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, UnreadableFileError) as error:
        return isinstance(error, BlockingIOError)
    return False


def _refused(path: Path, message: str) -> ConfigError:
    text = f"run_dir={path}: {message}, or choose another folder"
    return ConfigError.of("", None, text, code=FOLDER_UNUSABLE)
