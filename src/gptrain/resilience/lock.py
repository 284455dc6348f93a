"""One run, one folder: who holds the folder, and which run lives in it.

`flock` on `run_dir/.lock`: the kernel frees it when the holder dies, however it dies, so a stale
lock needs no judging of process numbers. Two traps are closed here. Such a lock belongs to the
open file, which forked children inherit: a data worker that outlives a killed run would keep the
folder locked, so every forked child closes it at once (spawned ones never get it). And the file is
never removed: a lock on a file that has lost its name excludes nobody.
"""

import fcntl
import functools
import json
import os
import socket
import stat
import time
import uuid
from pathlib import Path
from typing import cast

from gptrain.problems import FOLDER_UNUSABLE, ConfigError, code_of
from gptrain.small_files import UnreadableFile, open_regular, read_json

LOCK_NAME = ".lock"
# What a run opens, or makes files in; by all other names it replaces what is there, a link itself.
_FILES = (LOCK_NAME, "train.log")
_FOLDERS = (".hydra", ".beats")
# One write of a fixed length below a disk's sector: it is never torn, and covers what was there.
_RECORD_BYTES = 512
NAMED_AFTER_S = 1.0  # a new holder writes its name within milliseconds; a dying one has left
LOST_HOST_S = 120.0  # an NFS server keeps a lost host's lock for its lease, in Linux 90 s
_held: set[int] = set()  # descriptors of this process's locks


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
        self._descriptor: int | None = None

    def acquire(self) -> "RunLock":
        """Takes the folder, which is made if need be.

        Call it before the first file of the run is opened, its log included.

        Raises: ConfigError where another live process has it, where a name of ours in it is a link
            or none that a run makes, or if it cannot be made or written.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            _check_no_links(self.run_dir)
            _forget_in_forked_children()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(self.run_dir / LOCK_NAME, flags, 0o644)
            _held.add(self._descriptor)
            self._lock(time.monotonic() + self.wait_s)
            self.adopt(read_holder(self.run_dir).get("run_id") or uuid.uuid4().hex)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                about = "run_dir", self.run_dir, error.strerror or str(error)
                raise ConfigError.of(*about, code=code_of(error)) from error
            raise
        return self

    def adopt(self, run_id: str) -> None:
        """Makes this the folder of another run, all of which is elsewhere; or of its first."""
        self.run_id = run_id
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"run_id": run_id, "pid": os.getpid(), "host": socket.gethostname()}
        text = json.dumps(holder | {"started": started}).encode()
        descriptor = cast(int, self._descriptor)
        os.pwrite(descriptor, text.ljust(_RECORD_BYTES), 0)
        os.ftruncate(descriptor, _RECORD_BYTES)
        os.fsync(descriptor)

    def release(self) -> None:
        """Gives the folder back; harmless when it is not held, or held by this process's parent."""
        if self._descriptor in _held:  # a forked child has closed its copy already
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> "RunLock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, end_s: float) -> None:
        while True:
            try:
                return fcntl.flock(cast(int, self._descriptor), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end_s:
                    about = {"pid": "unknown", "host": "unknown", "started": "unknown"}
                    about |= read_holder(self.run_dir)
                    wrong = "held by process {pid} on {host} since {started}".format_map(about)
                    raise _refused(self.run_dir, f"{wrong}; wait for it, stop it") from None
                time.sleep(NAMED_AFTER_S)


def read_holder(run_dir: str | Path) -> dict:
    """What the last holder wrote: run_id, pid, host, started; {} where that is none of ours.

    The entry of a past holder stays: whether anybody holds the folder the lock alone knows.
    """
    try:
        holder = read_json(Path(run_dir) / LOCK_NAME)
    except (FileNotFoundError, UnreadableFile):  # of another error no new run may begin
        return {}
    kinds = {"run_id": str, "pid": int, "host": str, "started": str}
    if not isinstance(holder, dict):
        return {}
    return {key: holder[key] for key, kind in kinds.items() if isinstance(holder.get(key), kind)}


def is_held(run_dir: str | Path) -> bool:
    """Whether a live process has the run folder; nothing is written. A probe holds it for no time.

    A run that starts in this very moment asks twice.
    """
    try:
        with open_regular(Path(run_dir) / LOCK_NAME) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, UnreadableFile) as error:
        return isinstance(error, BlockingIOError)
    return False


def _refused(path: Path, wrong: str) -> ConfigError:
    text = f"run_dir={path}: {wrong}, or choose another folder"
    return ConfigError.of("", None, text, code=FOLDER_UNUSABLE)


def _check_no_links(run_dir: Path) -> None:
    """In a stranger's folder they lead elsewhere; `checkpoints` may be a link to another disk."""
    for name in (*_FILES, *_FOLDERS):
        path = run_dir / name
        try:
            mode = path.lstat().st_mode  # once: another start may be making it
        except FileNotFoundError:
            continue
        if not (stat.S_ISREG(mode) if name in _FILES else stat.S_ISDIR(mode)):
            what = "a link" if stat.S_ISLNK(mode) else "none that a run makes"
            raise _refused(path, f"{what}; remove it")


@functools.cache
def _forget_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    while _held:
        os.close(_held.pop())
