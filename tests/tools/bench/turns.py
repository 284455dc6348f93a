"""Let loops run in turns: a parent process gives the turns, and the loops wait for them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Contestant:
    """The processes of one loop, as the parent controls them.

    Attributes:
        steps_s: Seconds per step of the slowest rank, for each turn.
        peak_bytes: Peak memory of the largest rank.

    Args:
        loop: Function of the specification, of the file for its output and of the connection. It
            is called in each process.
        threads: Number of OpenMP threads of each rank.
        log_dir: Folder for the output of the processes.
    """

    def __init__(
        self, loop: Callable[..., None], spec: dict[str, Any], n_ranks: int, threads: int,
        log_dir: Path,
    ):  # fmt: skip
        self.name, self.n_ranks = spec["loop"], n_ranks
        self.steps_s: list[float] = []
        self.ranks = []
        variables = {"OMP_NUM_THREADS": threads}
        if n_ranks > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            variables |= {
                "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
        context = multiprocessing.get_context("spawn")
        for rank in range(n_ranks):
            if n_ranks > 1:
                variables |= {"RANK": rank, "LOCAL_RANK": rank}
            here, there = context.Pipe()
            log = log_dir / f"{self.name}-{rank}.log"
            process = context.Process(target=loop, args=(spec, log, there))
            with patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
                process.start()
            there.close()  # if the process ends, this one reads the end
            self.ranks.append((process, here, log))

    def take_turn(self, steps: int) -> None:
        """Let the loop do this number of steps while all other loops wait."""
        for _, connection, _ in self.ranks:
            connection.send(steps)
        replies = self.read()
        self.steps_s.append(max(seconds for seconds, _ in replies) / steps)
        self.peak_bytes = max(n_bytes for _, n_bytes in replies)

    def end(self) -> None:
        """Kill the processes of the loop."""
        for process, _, _ in self.ranks:
            process.kill()
            process.join()

    def read(self) -> list[tuple[float, int]]:
        """Wait until each rank has done its turn, or its first step, and return what it reports."""
        replies = []
        for _, connection, log in self.ranks:
            try:
                replies.append(connection.recv())
            except EOFError:
                words = log.read_text().rstrip().rpartition("\n")[2]
                message = f"the loop {self.name!r} ended by itself: {words}; see {log}"
                raise RuntimeError(message) from None
        return replies


class Turns:
    """The connection of a loop to the parent. The loop calls `step_done` after every step.

    Args:
        connection: Connection to the parent.
        synchronize: Function that waits until the device has finished its work.
        peak_bytes: Function that returns the peak memory so far.
    """

    def __init__(
        self, connection: Connection, synchronize: Callable[[], None], peak_bytes: Callable[[], int]
    ):
        self.connection, self.synchronize, self.peak_bytes = connection, synchronize, peak_bytes
        self._begin(1)

    def step_done(self) -> None:
        """Count a step. At the end of a turn, report the figures and wait for the next turn."""
        self.left -= 1
        if not self.left:
            self.synchronize()
            self.connection.send((time.perf_counter() - self.start_s, self.peak_bytes()))
            self._begin(self.connection.recv())

    def _begin(self, steps: int) -> None:
        self.left, self.start_s = steps, time.perf_counter()
