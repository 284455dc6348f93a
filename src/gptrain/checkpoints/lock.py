"""Lock of a run folder: one process holds the folder, and one run writes into it.

The lock is `flock` on `run_dir/.lock`. The kernel frees such a lock when its holder dies, however
it dies, so no code has to judge whether the process number in the file is still alive. The lock
belongs to the open file, which forked children inherit. Every forked child closes the file at once:
otherwise a data worker that outlives a killed run would keep the folder locked. The file is never
removed, because a lock on a file without a name excludes no other process.

The package filelock cannot be used. Its newest version for Python 3.10 (4.1) empties the file
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
# Expected kinds of the files that a run opens and of the folders in which a run makes files. A run
# replaces all other files in its folder without opening them, so a link in their place is harmless.
_KINDS = {LOCK_NAME: Path.is_file, "train.log": Path.is_file, ".hydra": Path.is_dir}
# A single write of this fixed length, below a disk's sector, is never torn and replaces the record.
_RECORD_BYTES = 512
NAMED_AFTER_S = 1.0  # a new holder has written its record by then, and a dying one has ended
LOST_HOST_S = 120.0  # an NFS server keeps a lost host's lock for its lease, in Linux 90 s


class RunLock:
    """Exclusive right to write into a run folder. Hold it as long as any process of the run lives.

    Args:
        run_dir: Folder of the run. It need not exist.
        wait_s: Time that a start waits for another process that holds the folder, in seconds.

    Attributes:
        run_id: Random identity of the run in this folder. The first holder draws it, and all later
            holders keep it. It is written into each checkpoint, so that a checkpoint of another run
            is recognized. Not set before the folder was locked.
    """

    run_id: str

    def __init__(self, run_dir: str | Path, wait_s: float = NAMED_AFTER_S) -> None:
        self.run_dir = Path(run_dir)
        self.wait_s = wait_s
        self._descriptor = -1

    def acquire(self) -> RunLock:
        """Lock the folder and return this lock. Create the folder if it does not exist.

        Waits for about `wait_s` seconds while another process holds the folder. Call it before any
        file of the run is opened, also before the log file.

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
            message = error.strerror or str(error)
            raise ConfigError.of("run_dir", self.run_dir, message, code=code_of(error)) from error
        return self

    def adopt(self, run_id: str) -> None:
        """Write this process and the identity of its run into the lock file.

        The folder must be locked by this object. `acquire` calls this method; another call changes
        the identity, for example if the run was restored from a mirror.

        Args:
            run_id: Identity of the run, which becomes the attribute `run_id`.

        Raises:
            OSError: If the file cannot be written, also if this object does not hold the folder.
        """
        self.run_id = run_id
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname()}
        text = json.dumps(holder | {"started": started}).encode()
        os.pwrite(self._descriptor, text.ljust(_RECORD_BYTES), 0)
        os.ftruncate(self._descriptor, _RECORD_BYTES)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Unlock the folder. Does nothing if it is not locked.

        In a forked child this closes the child's copy of the file, and the parent keeps the lock.
        """
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check_names(self) -> None:
        """Check that the files and folders that a run opens are no links and of the expected kind.

        In an untrusted run folder a link could let the run write to another place. Names that do
        not exist are fine. `checkpoints` is not checked, because it may be a link to another disk.

        Raises:
            ConfigError: If there is such a name.
        """
        for name, is_expected_kind in _KINDS.items():
            path = self.run_dir / name
            # Check for existence first: another start may create the file between the two checks.
            if path.is_symlink() or (path.exists() and not is_expected_kind(path)):
                kind = "a link" if path.is_symlink() else "not a file or folder of a run"
                raise _refused(path, f"{kind}; remove it")

    def _lock(self) -> None:
        """Take the lock of the open lock file. Wait about `wait_s` seconds while another has it.

        Raises:
            ConfigError: If another process still holds the lock. The message names its holder.
            OSError: If the file system cannot lock files.
        """
        end_s = time.monotonic() + self.wait_s
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end_s:
                    holder = dict.fromkeys(("pid", "host", "started"), "unknown")
                    holder |= read_holder(self.run_dir)
                    message = "held by process {pid} on {host} since {started}".format_map(holder)
                    raise _refused(self.run_dir, f"{message}; wait for it, stop it") from None
                time.sleep(NAMED_AFTER_S)


def read_holder(run_dir: str | Path) -> dict:
    """Return who has held a run folder last: the entries run_id, pid, host and started.

    The result is {} if there is no such record. The record stays when its holder ends: `is_held`
    returns whether a process holds the folder now.

    Args:
        run_dir: Run folder.

    Raises:
        OSError: If the file cannot be read.
    """
    try:
        holder = read_json(Path(run_dir) / LOCK_NAME)
    except (FileNotFoundError, UnreadableFileError):  # after another error no new run may begin
        return {}
    is_record = isinstance(holder, dict) and isinstance(holder.get("run_id"), str)
    return holder if is_record else {}


def is_held(run_dir: str | Path) -> bool:
    """Return whether a live process holds the run folder. Writes nothing.

    The check locks the folder for an instant. A run that starts in this instant tries again after a
    second. The result is False for a folder without a lock file, or with one that cannot be read.

    Args:
        run_dir: Run folder, which need not exist.
    """
    try:
        with open_regular(Path(run_dir) / LOCK_NAME) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, UnreadableFileError) as error:
        return isinstance(error, BlockingIOError)
    return False


def _refused(path: Path, message: str) -> ConfigError:
    """Return the ConfigError, with exit code 73, about a run folder that cannot be used.

    Args:
        path: Run folder, or a file in it.
        message: Reason, and what to do. The hint to choose another folder is appended.
    """
    text = f"run_dir={path}: {message}, or choose another folder"
    return ConfigError.of("", None, text, code=FOLDER_UNUSABLE)
