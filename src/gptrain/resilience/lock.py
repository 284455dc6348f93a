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
import re
import socket
import time
import uuid
from pathlib import Path

LOCK_NAME = ".lock"
_PATIENCE_S = 2.0  # a new holder writes its name within milliseconds; a dying one leaves in less
_held: set[int] = set()  # descriptors of this process's locks


class RunFolderHeld(Exception):
    """Another live process has the run folder."""

    def __init__(self, run_dir: Path, pid: int | None, host: str, started: str) -> None:
        self.run_dir, self.pid, self.host, self.started = run_dir, pid, host, started
        super().__init__(
            f"{run_dir}: held by process {pid} on {host} since {started}; "
            "wait for it, stop it, or choose another folder"
        )


class RunLock:
    """The right to write into a run folder; hold it as long as anything of the run lives.

    Attributes:
        run_id: identity of the run in this folder: drawn by its first holder, kept by all later
            ones. Checkpoints carry it, so one that was copied in from elsewhere is recognised.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        self.run_id = ""
        self._descriptor: int | None = None

    def acquire(self) -> "RunLock":
        """Take the folder, which is made if need be, or fail within two seconds.

        Raises: RunFolderHeld; OSError if the folder cannot be made or written.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        path = self.run_dir / LOCK_NAME
        _forget_in_forked_children()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _held.add(descriptor)
        self._descriptor = descriptor
        try:
            give_up = time.monotonic() + _PATIENCE_S
            while not _try_lock(descriptor):
                holder = read_holder(self.run_dir)
                if _is_plausible(holder) or time.monotonic() > give_up:
                    raise RunFolderHeld(
                        self.run_dir,
                        holder.get("pid"),
                        holder.get("host", "an unknown host"),
                        holder.get("started", "an unknown time"),
                    )
                time.sleep(0.02)
            self.run_id = read_holder(self.run_dir).get("run_id") or uuid.uuid4().hex
            self._write(os.getpid())
        except BaseException:
            self._close()
            raise
        return self

    def release(self) -> None:
        """Give the folder back; harmless when it is not held, or held by this process's parent."""
        try:
            if self._descriptor in _held:
                self._write(None)
        finally:
            self._close()

    def __enter__(self) -> "RunLock":
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _write(self, pid: int | None) -> None:
        # run_id comes first and never changes: no torn write of a later holder can damage it.
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        holder = {"run_id": self.run_id, "pid": pid}
        if pid is not None:
            holder |= {"host": socket.gethostname(), "started": started}
        text = json.dumps(holder).encode()
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        os.fsync(self._descriptor)

    def _close(self) -> None:
        if self._descriptor in _held:  # a forked child has closed its copy already
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None


def read_holder(run_dir: str | Path) -> dict:
    """What the lock file says: run_id, pid (None when free), host, started; {} when it is new.

    The words of a holder that was killed stay, so a pid here is no proof that somebody holds it.
    """
    try:
        text = (Path(run_dir) / LOCK_NAME).read_text(errors="replace")
    except FileNotFoundError:
        return {}
    try:
        return json.loads(text)
    except ValueError:  # caught while it is written; the identity at its head is constant
        found = re.match(r'\{"run_id": "([0-9a-f]{32})"', text)
        return {"run_id": found[1]} if found else {}


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_plausible(holder: dict) -> bool:
    """Whether these can be the words of the present holder and not of a dead predecessor."""
    if holder.get("pid") is None:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and another user's
        pass
    return True


@functools.cache
def _forget_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    while _held:
        os.close(_held.pop())
