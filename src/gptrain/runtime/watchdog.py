"""Detection of ranks that hang: heartbeats, and the threads and processes that watch them.

The main thread of a rank writes a heartbeat whenever it makes progress: after a step, a validation
batch, a piece of a file. A rank is silent if its last heartbeat is older than the timeout, or than
the longer time that this heartbeat allowed for the phase that begins. When one rank is stopped, the
other ranks soon wait for that rank in a collective operation and are silent, too. So the silent
ranks do not always reveal which rank was stopped.

A thread in every rank ends the rank when there is nothing left to wait for: its parent process is
gone, another rank has failed (the collective operations will never complete), or its own main
thread is silent. It ends the rank by os._exit, because no exception reaches a main thread that is
stuck in a collective operation. If this thread cannot run either, because a C function keeps the
interpreter lock, a supervisor with a `StallWatch` sends `STACKS_SIGNAL` and then ends the process.
The handler of this signal prints the stacks without the interpreter lock. Without a supervisor a
person can send it: Ctrl+backslash prints the stacks and ends the process.

No timer prints the stacks. A timer would also expire while the process is stopped (Ctrl-Z), and
would read the stacks of running threads after fg, which can crash Python.
"""

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptrain.checkpoints.status import PreemptedError, read_status, write_status
from gptrain.core.errors import FAILED, HUNG, exit_code
from gptrain.core.labels import shorten
from gptrain.runtime.signals import StopFlag

GRACE_S = 5.0  # time for a rank to end by itself after another rank has failed
STACKS_SIGNAL = signal.SIGQUIT  # a rank prints the stacks of its threads when it gets this signal
POLL_S = 0.5  # interval at which a rank's guard checks its main thread
_MAX_GAP_S = 2.0  # longest interval between two checks that counts as silence
_RECORD_BYTES = 200  # fixed length of a record, so that each write replaces the record before


@dataclass(frozen=True)
class Progress:
    """The last heartbeat of one rank.

    Attributes:
        rank: Global rank.
        n_beats: Number of heartbeats so far.
        phase: Phase in which the rank was at this heartbeat, for example "train" or "save".
        step: Optimizer step at the heartbeat.
        allow_s: Longest time until the next heartbeat, in seconds, if the phase may take longer
            than the timeout. 0 otherwise.
    """

    rank: int
    n_beats: int
    phase: str
    step: int
    allow_s: float = 0.0


class Heartbeat:
    """Writer of this rank's heartbeat file, by which the watchdogs of the job see its progress.

    Each heartbeat replaces the one before by one small write. The constructor writes the first one.

    Args:
        folder: Folder of the heartbeats of all ranks, which is created.
        rank: Global rank of this process.

    Attributes:
        progress: The last heartbeat.

    Raises:
        OSError: If the file cannot be created.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self.folder = Path(folder)
        self.rank = rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(rank, 0, "start", 0)
        self._path = self.folder / f"rank-{rank:05d}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o644)
        self.beat()

    @property
    def step(self) -> int:
        """Optimizer step of the last heartbeat."""
        return self.progress.step

    def beat(self, step: int | None = None, phase: str | None = None, allow_s: float = 0.0) -> None:
        """Record that the main thread has made progress.

        Args:
            step: Optimizer step. Defaults to the step of the last heartbeat.
            phase: Phase of the run that begins, such as "train". Defaults to the phase of the last
                heartbeat.
            allow_s: Longest time until the next heartbeat, in seconds, if the phase may take longer
                than the timeout, such as a compilation. 0 allows the timeout.
        """
        last = self.progress
        step = last.step if step is None else step
        self.progress = Progress(self.rank, last.n_beats + 1, phase or last.phase, step, allow_s)
        record = json.dumps([self.progress.n_beats, self.progress.phase, step, allow_s])
        os.pwrite(self._descriptor, record.encode().ljust(_RECORD_BYTES), 0)

    def close(self) -> None:
        """Remove the heartbeat file, because this rank is done and must not be watched any longer.

        `beat` must not be called afterwards.
        """
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def read_progress(folder: str | Path) -> list[Progress]:
    """Return the last heartbeat of every rank that writes into a folder, in rank order.

    A rank that has closed its heartbeat, because it is done, is left out. The list is empty if the
    folder does not exist.

    Args:
        folder: Folder of the heartbeats of one start.
    """
    progress = []
    for path in sorted(Path(folder).glob("rank-?????")):
        with contextlib.suppress(FileNotFoundError, ValueError):  # just closed, or just created
            progress.append(Progress(int(path.name[5:]), *json.loads(path.read_bytes())))
    return progress


def furthest_behind(silent: list[Progress]) -> Progress:
    """Return the heartbeat with the lowest step, and of several the first one.

    Its rank is probably the one that hangs, while the other silent ranks wait for it.

    Args:
        silent: Last heartbeat of each silent rank, at least one.
    """
    return min(silent, key=lambda progress: progress.step)


def hang_message(silent: list[Progress], limit_s: float) -> str:
    """Return the error message of a hang, which names the silent ranks and where they are.

    For example: "no progress for 60 s: rank 1 at step 4 in phase data; ranks 0, 2 at step 5 in
    phase train". Ranks at the same place are named together, and those at the earliest step come
    first.

    Args:
        silent: Last heartbeat of each rank that has sent none for too long.
        limit_s: Time after which a rank counts as silent, in seconds.
    """
    places = defaultdict(list)
    for progress in silent:
        places[progress.step, progress.phase].append(progress.rank)
    where = [
        f"rank{'s' if len(numbers) > 1 else ''} {shorten(numbers)} at step {step} in phase {phase}"
        for (step, phase), numbers in sorted(places.items())
    ]
    return f"no progress for {limit_s:.0f} s: {'; '.join(where)}"


class StallWatch:
    """Finds the ranks that have sent no heartbeat for longer than allowed.

    Time in which the watching process itself was stopped (Ctrl-Z, a suspended job) does not count.

    Args:
        read: Function that returns the last heartbeats, for example `read_progress` of a folder.
        timeout_s: Longest time without a heartbeat, in seconds, unless the last heartbeat allows
            more.
    """

    def __init__(self, read: Callable[[], list[Progress]], timeout_s: float) -> None:
        self._read = read
        self._timeout_s = timeout_s
        self._last: list[Progress] = []
        self._silent_s: dict[int, float] = defaultdict(float)
        self._looked_s = time.monotonic()

    def limit_s(self, progress: Progress) -> float:
        """Return how long a rank may be silent after a heartbeat, in seconds.

        Args:
            progress: Heartbeat, which may allow more than the timeout.
        """
        return max(self._timeout_s, progress.allow_s)

    def silent_ranks(self) -> list[Progress]:
        """Return the last heartbeats of the ranks that have been silent for too long.

        Call it at least every two seconds: a longer gap between two calls counts as two seconds.
        The first call returns an empty list.
        """
        now_s = time.monotonic()
        elapsed_s = min(now_s - self._looked_s, _MAX_GAP_S)
        self._looked_s = now_s
        last = self._last
        self._last = self._read()
        silent = []
        for progress in self._last:
            is_silent = progress in last
            silent_s = self._silent_s[progress.rank] + elapsed_s if is_silent else 0.0
            self._silent_s[progress.rank] = silent_s
            if silent_s > self.limit_s(progress):
                silent.append(progress)
        return silent


class Guard:
    """Watchdog of one rank: a context manager around the training function.

    A thread ends this process, by os._exit, if its main thread makes no progress for too long, if
    another rank has failed, so that a collective operation would never complete, or if the
    supervisor is gone.

    Args:
        run_dir: Folder of the run, in which status.json is read and written.
        beats: Folder of the heartbeats of all ranks.
        stop: Flag that is true once the run was asked to stop. Its signal handlers are installed
            by the caller.
        rank: Global rank of this process.
        timeout_s: Longest time until the next heartbeat of the main thread, in seconds, unless a
            heartbeat allows more.
        parent_pid: Process number of the supervisor. This rank ends when the supervisor is gone.
            None if a person started this process; the shell of a run may end before the run.
        describe: Function that returns more facts for the status of a hang: the checkpoint and the
            command that resumes from it.

    Attributes:
        heartbeat: Heartbeat of this rank.
        doing: Description of the current activity, for the report of an exception.

    Raises:
        OSError: If the heartbeat file cannot be created.
    """

    def __init__(
        self,
        run_dir: str | Path,
        beats: str | Path,
        stop: StopFlag,
        *,
        rank: int,
        timeout_s: float,
        parent_pid: int | None = None,
        describe: Callable[[], dict] = dict,
    ) -> None:
        self.stop = stop
        self.heartbeat = Heartbeat(beats, rank)
        self.doing = ""
        self._run_dir = Path(run_dir)
        self._describe = describe
        self._timeout_s = timeout_s
        self._parent_pid = parent_pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._old_status = read_status(run_dir)  # status of the previous start

    def __enter__(self) -> "Guard":
        # SIGQUIT still ends a process that a person has started. The supervisor ends its own ranks.
        faulthandler.register(STACKS_SIGNAL, file=2, chain=self._parent_pid is None)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        faulthandler.unregister(STACKS_SIGNAL)
        self.heartbeat.close()

    def leave_if_asked(self) -> None:
        """End the run by an error if this rank was asked to stop while there is nothing to save.

        Raises:
            PreemptedError: If this rank was asked to stop.
        """
        if self.stop:
            raise PreemptedError

    @contextlib.contextmanager
    def nothing_to_save(self) -> Generator[None, None, None]:
        """End the block at once when this rank is asked to stop, because there is nothing to save.

        The signal handler raises the error at any place in the block, for example while a corpus is
        tokenized.

        Raises:
            PreemptedError: If this rank was asked to stop before the block, or is asked within it.
        """
        self.stop.error = PreemptedError()  # before the check: a signal may come just after it
        try:
            self.leave_if_asked()
            yield
        finally:
            self.stop.error = None

    def _watch(self) -> None:
        """Watch this rank until the training function has ended. Runs in a thread of its own.

        Ends the process if the supervisor is gone, another rank has failed, or the main thread is
        silent for too long.
        """
        own = StallWatch(lambda: [self.heartbeat.progress], self._timeout_s)
        while True:
            limit_s = own.limit_s(self.heartbeat.progress)
            if self._done.wait(POLL_S):
                return
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self._leave("the parent process has ended", FAILED)
            elif (status := self._new_failure()) is not None:
                reason = f"rank {status.get('rank')} has failed ({status.get('cause')})"
                self._leave(reason, status["exit_code"])
            elif own.silent_ranks():
                self._hang(limit_s)

    def _new_failure(self) -> dict | None:
        """Return the content of status.json if a rank has failed since this start, else None."""
        status = read_status(self._run_dir)
        ends_ranks = status is not None and exit_code(status["exit_code"]).ends_ranks
        return status if ends_ranks and status != self._old_status else None

    def _leave(self, reason: str, exit_code: int) -> None:
        """End this process, because another process of the job has failed.

        After a hang of another rank this process prints its stacks and ends at once. Otherwise its
        main thread has a few seconds (GRACE_S) to end by itself. If it does, this method returns.

        Args:
            reason: Reason, which is printed.
            exit_code: Exit code of this process.
        """
        is_hang = exit_code == HUNG
        if is_hang or not self._done.wait(GRACE_S):
            self._print(f"leaving: {reason}", stacks=is_hang)
            os._exit(exit_code)

    def _hang(self, limit_s: float) -> None:
        """Print the silent ranks and this rank's stacks, write status.json, and end this process.

        Returns without an effect if the main thread makes progress at the last moment.

        Args:
            limit_s: Time for which this rank has been silent, in seconds.
        """
        own = self.heartbeat.progress
        before = read_progress(self.heartbeat.folder)
        if self._done.wait(POLL_S) or own != self.heartbeat.progress:
            return
        after = read_progress(self.heartbeat.folder)
        silent = [progress for progress in after if progress in before] or [own]
        message = hang_message(silent, limit_s)
        self._print(message, stacks=True)
        status: dict[str, Any] = {"cause": "hang", "exit_code": HUNG, "message": message}
        status |= {"rank": furthest_behind(silent).rank, "step": own.step}
        with contextlib.suppress(OSError):  # a full disk must not keep a hung rank alive
            write_status(self._run_dir, **status | self._describe())
        if not self._done.wait(2 * POLL_S):  # let the other ranks read the status and print stacks
            os._exit(HUNG)

    def _print(self, message: str, stacks: bool) -> None:
        """Print a line on stderr that begins with the rank, and the stacks if asked.

        Args:
            message: Text, which is printed after the rank.
            stacks: Whether to print the stacks of all threads of this process.
        """
        os.write(2, f"rank {self.heartbeat.rank}: {message}\n".encode())
        if stacks:
            faulthandler.dump_traceback(file=2)
