"""One run, one folder: who holds the folder, and which run lives in it.

`flock` on `run_dir/.lock`: the kernel frees it when the holder dies, however it dies, so a stale
lock needs no judging of process numbers. Two traps are closed here. Such a lock belongs to the
open file, which forked children inherit: a data worker that outlives a killed run would keep the
folder locked, so every forked child closes it at once (spawned ones never get it). And the file is
never removed: a lock on a file that has lost its name excludes nobody.
"""

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
# What a run opens, or makes files in; by all other names it replaces what is there, a link itself.
_KINDS = {
    LOCK_NAME: Path.is_file, "train.log": Path.is_file,
    ".hydra": Path.is_dir, ".beats": Path.is_dir,
}  # fmt: skip
# One write of a fixed length below a disk's sector: it is never torn, and covers what was there.
_RECORD_BYTES = 512
NAMED_AFTER_S = 1.0  # a new holder writes its name within milliseconds; a dying one has left
LOST_HOST_S = 120.0  # an NFS server keeps a lost host's lock for its lease, in Linux 90 s


class RunLock:
    """The right to write into a run folder; hold it as long as anything of the run lives.

    Args:
        wait_s: for how long a start waits for another process that holds the folder.

    Attributes:
        run_id: identity of the run in this folder: drawn by its first holder, kept by all later
            ones. Checkpoints carry it, so one that was copied in from elsewhere is recognised.
    """

    def __init__(self, run_dir: str | Path, wait_s: float = NAMED_AFTER_S) -> None:
        self.run_dir, self.wait_s = Path(run_dir), wait_s
        self.run_id = ""
        self._descriptor = -1

    def acquire(self) -> "RunLock":
        """Takes the folder, which is made if need be.

        Call it before the first file of the run is opened, its log included.

        Raises: ConfigError where another live process has it, where a name of ours in it is a link
            or none that a run makes, or if it cannot be made or written.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._check_names()
            os.register_at_fork(after_in_child=self.release)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(self.run_dir / LOCK_NAME, flags, 0o644)
            self._lock()
            self.adopt(read_holder(self.run_dir).get("run_id") or uuid.uuid4().hex)
        except BaseException as error:  # of Ctrl-C while it waits, too
            self.release()
            if not isinstance(error, OSError):
                raise
            about = "run_dir", self.run_dir, error.strerror or str(error)
            raise ConfigError.of(*about, code=code_of(error)) from error
        return self

    def adopt(self, run_id: str) -> None:
        """Makes this the folder of another run, all of which is elsewhere; or of its first."""
        self.run_id = run_id
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname()}
        text = json.dumps(holder | {"started": started}).encode()
        os.pwrite(self._descriptor, text.ljust(_RECORD_BYTES), 0)
        os.ftruncate(self._descriptor, _RECORD_BYTES)
        os.fsync(self._descriptor)

    def release(self) -> None:
        """Gives the folder back, once; in a forked child the parent keeps it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "RunLock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check_names(self) -> None:
        """In a stranger's folder links lead elsewhere; `checkpoints` may be one to another disk."""
        for name, is_ours in _KINDS.items():
            path = self.run_dir / name
            # In this order: another start may be making it between the two questions.
            if path.is_symlink() or (path.exists() and not is_ours(path)):
                what = "a link" if path.is_symlink() else "none that a run makes"
                raise _refused(path, f"{what}; remove it")

    def _lock(self) -> None:
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
    """What the last holder wrote: run_id, pid, host, started; {} where that is none of ours.

    The entry of a past holder stays: whether anybody holds the folder the lock alone knows.
    """
    try:
        holder = read_json(Path(run_dir) / LOCK_NAME)
    except (FileNotFoundError, UnreadableFileError):  # of another error no new run may begin
        return {}
    is_ours = isinstance(holder, dict) and isinstance(holder.get("run_id"), str)
    return holder if is_ours else {}


def is_held(run_dir: str | Path) -> bool:
    """Whether a live process has the run folder; nothing is written. A probe holds it for no time.

    A run that starts in this very moment asks twice.
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
