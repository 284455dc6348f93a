"""The collectives of torch.distributed, and two all-reduces made of sends and receives.

The buffer of a rank has one row for each of the n ranks, (n, any). Rank 0 is the root.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain.core.schema import RunConfig
from gptrain.parallel.mesh import gather, start_group
from gptrain.runtime.devices import find_devices, set_threads
from gptrain.runtime.measure import wait_for
from gptrain.runtime.process import rank_variables, store_path, this_process

TIMED_BATCHES = 5  # number of batches of calls that are timed, after one batch that is not


@dataclass(frozen=True)
class Collective:
    """A collective of torch.distributed on a buffer that has one row for each of the n ranks.

    Attributes:
        rows_sent: Two letters for the rows that the root and that each other rank passes: `n` for
            all n rows, `1` for one row, `0` for none.
        rows_received: Two letters for the rows that the root and that each other rank gets.
        bus_factor: Numbers a and b: the bus bandwidth is (a + b / n) times the algorithm bandwidth,
            the bytes of a buffer per second. Source: github.com/NVIDIA/nccl-tests,
            doc/PERFORMANCE.md.
        call: Function of two buffers, one to send and one to receive. Before the call the buffer to
            receive must be a copy of the buffer to send, because some collectives work in place and
            read the rows to send from it.
    """

    rows_sent: str
    rows_received: str
    bus_factor: tuple[int, int]
    call: Callable[[Tensor, Tensor], Any]


COLLECTIVES = {
    "broadcast": Collective("n0", "nn", (1, 0), lambda send, recv: dist.broadcast(recv, src=0)),
    "reduce": Collective("nn", "n0", (1, 0), lambda send, recv: dist.reduce(recv, dst=0)),
    "all_reduce": Collective("nn", "nn", (2, -2), lambda send, recv: dist.all_reduce(recv)),
    "scatter": Collective(
        "n0", "11", (1, -1), lambda send, recv: dist.scatter(recv[0], rows_on_root(send))
    ),
    "gather": Collective(
        "11", "n0", (1, -1), lambda send, recv: dist.gather(send[0], rows_on_root(recv))
    ),
    "all_gather": Collective(
        "11", "nn", (1, -1), lambda send, recv: dist.all_gather(list(recv), send[0])
    ),
    "reduce_scatter": Collective(
        "nn", "11", (1, -1), lambda send, recv: dist.reduce_scatter(recv[0], list(send))
    ),
    "all_to_all": Collective(
        "nn", "nn", (1, -1), lambda send, recv: dist.all_to_all_single(recv, send)
    ),
}


@contextmanager
def process_group(cfg: RunConfig) -> Generator[torch.device, None, None]:
    """Create the process group of all ranks, and yield the device of this rank.

    All ranks must enter the block. The group is destroyed when the block ends without an error.
    Also sets the number of CPU threads, and prints the backend on rank 0.

    Args:
        cfg: Options of the command. The keys of `trainer`, `strategy.backend` and
            `strategy.timeout_s` are used.

    Raises:
        MissingRanksError: If not all ranks start in time, or if their address cannot be used.
    """
    devices = find_devices(cfg)
    process = this_process()
    backend = cfg.strategy.backend or devices.backend
    device = devices.device(process.local_rank)
    set_threads(devices.n_local)
    start_group(
        backend,
        device,
        process.rank,
        devices.world_size,
        cfg.strategy.timeout_s,
        store_path(cfg.run_dir),
        rank_variables(),
    )
    print_on_rank_0(f"{backend}, {devices.world_size} ranks; the root is rank 0")
    yield device
    dist.destroy_process_group()


def rows_on_root(rows: Tensor) -> list[Tensor] | None:
    """Return a buffer as a list of its rows on the root (rank 0), and None on every other rank.

    `dist.scatter` and `dist.gather` expect this as the argument that only the root passes.

    Args:
        rows: Buffer of this rank, with one row for each of the n ranks, (n, any).
    """
    return list(rows) if dist.get_rank() == 0 else None


def explain(name: str, device: torch.device) -> None:
    """Run a collective on a small buffer, and print the rows that each rank passes and gets.

    All ranks must call this function; rank 0 prints. Row j of rank r holds the number 10 r + j.

    Args:
        name: Key of `COLLECTIVES`.
        device: Device of this rank.
    """
    collective = COLLECTIVES[name]
    sent = torch.arange(dist.get_world_size(), device=device).view(-1, 1) + 10.0 * dist.get_rank()
    received = sent.clone()
    collective.call(sent, received)
    before = gather(format_rows(sent, collective.rows_sent))
    after = gather(format_rows(received, collective.rows_received))
    width = max(map(len, before))
    print_on_rank_0(f"\n{name}")
    for rank, (rows_before, rows_after) in enumerate(zip(before, after, strict=True)):
        print_on_rank_0(f"  rank {rank}  {rows_before:{width}}  ->  {rows_after}")


def format_rows(rows: Tensor, rows_shown: str) -> str:
    """Return the rows of this rank as a text such as `[ 10  11 ]`, or `-` if there are none.

    Args:
        rows: Buffer of this rank, with one number per row, (n, 1).
        rows_shown: Two letters, for rank 0 and for each other rank: `n` formats all rows, `1` the
            first row, `0` none.
    """
    letter = rows_shown[0] if dist.get_rank() == 0 else rows_shown[1]
    n_shown = {"n": len(rows), "1": 1, "0": 0}[letter]
    numbers = "".join(f"{number:3.0f} " for number in rows[:n_shown].flatten())
    return f"[{numbers}]" if numbers else "-"


def print_on_rank_0(line: str) -> None:
    """Print a line if this process is rank 0 of the process group, and flush stdout."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def time_calls(
    call: Callable[[], Any],
    device: torch.device,
    n_calls: int,
    choose: Callable[[list[float]], float] = median,
) -> float:
    """Measure how many seconds one call takes on the slowest rank.

    All ranks must call this function, and all get the same result. The calls are timed in
    `TIMED_BATCHES` batches after an untimed one. Each batch begins with a barrier.

    Args:
        call: Function to time. All ranks call it, because it may be a collective.
        device: Device of this rank.
        n_calls: Number of calls of a batch.
        choose: Function that combines the times per call of a rank's batches into one.
    """
    seconds = []
    for _ in range(1 + TIMED_BATCHES):
        dist.barrier()
        start_s = time.perf_counter()
        for _ in range(n_calls):
            call()
        wait_for(device)
        seconds.append((time.perf_counter() - start_s) / n_calls)
    return max(gather(choose(seconds[1:])))


def compare_all_reduces(device: torch.device, n_bytes: int) -> None:
    """Print a table of three all-reduces: through rank 0, around a ring, and the backend's own.

    A line of the table has the time and, for the first two, the MiB that rank 0 and the last rank
    have sent. All ranks must call this function; rank 0 prints.

    Args:
        device: Device of this rank.
        n_bytes: Size of the buffer. It is rounded down to a multiple of 4 bytes times the number of
            ranks: an fp32 matrix with one row per rank.

    Raises:
        RuntimeError: On a rank whose result differs from that of the backend.
    """
    rank = dist.get_rank()
    n_ranks = dist.get_world_size()
    values = torch.arange(n_bytes // 4 // n_ranks * n_ranks, device=device).view(n_ranks, -1)
    values = (values % 1000 + rank).float()  # sums of small integers are exact in any order
    expected = values.clone()
    dist.all_reduce(expected)
    print_on_rank_0(
        f"\nall-reduce of {values.nbytes / 2**20:.1f} MiB   rank 0 sent   other ranks   time ms"
    )
    algorithms = {
        "through rank 0": all_reduce_by_center,
        "around a ring": all_reduce_by_ring,
        dist.get_backend(): dist.all_reduce,
    }
    for name, all_reduce in algorithms.items():
        result = values.clone()
        sent_bytes = gather(all_reduce(result))  # the backend's returns None
        if not torch.equal(result, expected):
            raise RuntimeError(f"all-reduce {name} differs from the library's on rank {rank}")
        columns = "".join(
            f"{sent / 2**20:10.1f} MiB" if sent else f"{'-':>14}"
            for sent in (sent_bytes[0], sent_bytes[-1])
        )
        result.zero_()
        seconds = time_calls(lambda f=all_reduce, buffer=result: f(buffer), device, 1)
        print_on_rank_0(f"{name:21}{columns}{seconds * 1e3:10.2f}")
    print_on_rank_0(
        "n ranks: rank 0 sends n - 1 buffers, one after another; in a ring each rank sends\n"
        "2(n - 1)/n buffers, all ranks at once"
    )


def all_reduce_by_center(buffer: Tensor) -> int:
    """Sum a buffer over all n ranks in place, through rank 0, and return the bytes that were sent.

    Rank 0 receives n - 1 buffers and then sends n - 1 buffers, one after another. The time
    therefore grows with the number of ranks, while all wait for the link of rank 0. All ranks must
    call this function.

    Args:
        buffer: Buffer of this rank, of one shape on all ranks.

    Returns:
        Bytes that this rank sent.
    """
    n_ranks = dist.get_world_size()
    if dist.get_rank() > 0:
        dist.send(buffer, 0)
        dist.recv(buffer, 0)
        return buffer.nbytes
    received = torch.empty_like(buffer)
    for source in range(1, n_ranks):
        dist.recv(received, source)
        buffer += received
    for target in range(1, n_ranks):
        dist.send(buffer, target)
    return (n_ranks - 1) * buffer.nbytes


def all_reduce_by_ring(buffer: Tensor) -> int:
    """Sum a buffer over all n ranks in place, around a ring, and return the bytes that were sent.

    In each of 2(n - 1) steps, every rank sends one row to its right neighbour and receives one row
    from its left neighbour, all ranks at once. After n - 1 steps, each row is summed on one rank
    (reduce-scatter). After n - 1 more steps, each row is on all ranks (all-gather). A rank sends
    2(n - 1)/n buffers, which hardly depends on the number of ranks. All ranks must call this
    function.

    Args:
        buffer: Buffer of this rank, (n, any): one row for each rank.

    Returns:
        Bytes that this rank sent.
    """
    rank = dist.get_rank()
    n_ranks = dist.get_world_size()
    left = (rank - 1) % n_ranks
    right = (rank + 1) % n_ranks
    received = torch.empty_like(buffer[0])
    for step in range(2 * (n_ranks - 1)):
        sent_row = buffer[(rank - step) % n_ranks]
        received_row = buffer[(rank - step - 1) % n_ranks]
        # Start both as one batch: with NCCL, ranks that all send first would wait for a receiver.
        operations = [
            dist.P2POp(dist.isend, sent_row, right),
            dist.P2POp(dist.irecv, received, left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if step < n_ranks - 1:
            received_row += received
        else:
            received_row.copy_(received)
    return 2 * (n_ranks - 1) * received.nbytes
