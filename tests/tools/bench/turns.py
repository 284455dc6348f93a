"""Let loops run in turns: a parent process gives the turns, and the loops wait for them.

This file needs the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Contestant:
    """The processes of one loop, as the parent controls them.

    Attributes:
        steps_s: Seconds per step of the slowest rank, for each turn.
        peak_bytes: Peak memory of the largest rank.

    Args:
        spec: Options of the loop, see `tests.tools.bench.loops`.
        threads: Number of OpenMP threads of each rank.
        log_dir: Folder for the output of the processes.
    """

    def __init__(self, name: str, spec: dict[str, Any], n_ranks: int, threads: int, log_dir: Path):
        self.name, self.n_ranks = name, n_ranks
        self.steps_s: list[float] = []
        self.logs = [log_dir / f"{name}-{rank}.log" for rank in range(n_ranks)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            place = {
                "WORLD_SIZE": str(n_ranks),
                "LOCAL_WORLD_SIZE": str(n_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free.getsockname()[1]),
                "GLOO_SOCKET_IFNAME": "lo",
            }
        words = [sys.executable, "-m", "tests.tools.bench.loops", json.dumps(spec)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = []
        for rank, log in enumerate(self.logs):
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            if n_ranks > 1:
                environment |= {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(words, env=environment, stderr=log.open("w"), **pipes)
            self.ranks.append(process)

    def first_step(self) -> None:
        """Wait until each rank has done its first step."""
        self._read()

    def take_turn(self, steps: int) -> None:
        """Let the loop do this number of steps while all other loops wait."""
        for rank in self.ranks:
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        replies = self._read()
        self.steps_s.append(max(reply["seconds"] for reply in replies) / steps)
        self.peak_bytes = max(reply["peak_bytes"] for reply in replies)

    def end(self) -> None:
        """Kill the processes of the loop."""
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def _read(self) -> list[dict[str, float]]:
        lines = [rank.stdout.readline() for rank in self.ranks]
        for line, path in zip(lines, self.logs, strict=True):
            if not line:
                words = path.read_text().rstrip().rpartition("\n")[2]
                raise RuntimeError(f"the loop {self.name!r} ended by itself: {words}; see {path}")
        return [json.loads(line) for line in lines]


class Turns:
    """The connection of a loop to the parent. The loop calls `step_done` after every step.

    Args:
        synchronize: Function that waits until the device has finished its work.
        peak_bytes: Function that returns the peak memory so far.
    """

    def __init__(self, synchronize: Callable[[], None], peak_bytes: Callable[[], int]):
        self.synchronize, self.peak_bytes = synchronize, peak_bytes
        self.parent = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # the log also receives what the loop prints to stdout
        self._begin(1)

    def step_done(self) -> None:
        """Count a step. At the end of a turn, report the figures and wait for the next turn."""
        self.left -= 1
        if self.left:
            return
        self.synchronize()
        seconds = time.perf_counter() - self.start_s
        reply = {"seconds": seconds, "peak_bytes": self.peak_bytes()}
        print(json.dumps(reply), file=self.parent, flush=True)
        word = sys.stdin.readline()
        if not word:
            os._exit(0)  # the parent is gone
        self._begin(int(word))

    def _begin(self, steps: int) -> None:
        self.left, self.start_s = steps, time.perf_counter()
