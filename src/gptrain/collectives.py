"""Run the eight collectives between processes and print what each rank passes and gets.

    python -m gptrain.collectives trainer.devices=4
    torchrun --nproc_per_node=4 -m gptrain.collectives

    trainer.devices      number of ranks (2)
    trainer.accelerator  cpu, or gpu: NCCL, with a GPU for each rank (auto: gpu if there are enough)
    max_bytes            size of the buffer of the last comparison (16 MiB)

At the end, the command compares three all-reduces: one through rank 0, one around a ring, and that
of the backend. A wrong sum is an error.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from gptrain import config
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import between
from gptrain.lit.measure import wait_for
from gptrain.parallel.mesh import gather
from gptrain.runtime.process import count_devices

_N_TIMED = 5  # timed calls, after one that is not


class _CollectivesRun(RunConfig):
    """Keys of the command: those of a run, and `max_bytes`, the size of the compared buffer."""

    max_bytes: Annotated[int, between(2**16)] = 2**24


def main() -> None:
    """Run `python -m gptrain.collectives` with the overrides in `sys.argv`, and exit.

    The exit codes are those of all commands. Without `trainer.devices` there are two ranks.
    """
    sys.argv[1:] = ["trainer.devices=2", *sys.argv[1:]]
    config.main(_start, _CollectivesRun, usage=__doc__)


def _start(cfg: _CollectivesRun) -> None:
    """Start the ranks and wait for them, or run this process as a rank that torchrun started."""
    n_gpus = 0 if cfg.trainer.accelerator == "cpu" else torch.cuda.device_count()
    if "RANK" in os.environ:
        on_gpu = n_gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group("nccl" if on_gpu else "gloo")
        run_rank(int(os.environ["LOCAL_RANK"]), on_gpu, cfg.max_bytes)
        return dist.destroy_process_group()
    n_ranks = count_devices(cfg.trainer.devices) or max(1, n_gpus)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no port is reachable from other machines
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", n_ranks, n_gpus >= n_ranks, cfg.max_bytes)
        torch.multiprocessing.spawn(_start_rank, arguments, n_ranks)


def _start_rank(rank: int, path: str, n_ranks: int, on_gpu: bool, max_bytes: int) -> None:
    """Connect this process with the other ranks through the file `path`, and run the rank."""
    store, backend = dist.FileStore(path, n_ranks), "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=n_ranks, store=store)
    run_rank(rank, on_gpu, max_bytes)
    dist.destroy_process_group()


def run_rank(local_rank: int, on_gpu: bool, max_bytes: int) -> None:
    """Run all collectives on this rank, print their rows, and compare three all-reduces.

    All ranks of the process group, which must exist, must call this function. Rank 0 prints.

    Args:
        local_rank: Index of the rank on its machine, and of its GPU.
        on_gpu: True if each rank has a GPU, False if the buffers are on the CPU.
        max_bytes: Size of the buffer of the comparison, in bytes.

    Raises:
        RuntimeError: If an all-reduce has a wrong result on this rank.
    """
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    _print_on_rank_0(f"{dist.get_backend()}, {dist.get_world_size()} ranks; the root is rank 0")
    for name in _COLLECTIVES:
        _show(name, device)
    compare_all_reduces(device, max_bytes)


def _rows_on_root(rows: Tensor) -> list[Tensor] | None:
    """Return the rows of a buffer on rank 0, and None on every other rank, as torch expects it."""
    return list(rows) if dist.get_rank() == 0 else None


# Rows that the root and that each other rank passes and gets (n: all, 1: one, 0: none), and the
# call on a buffer to send and one to receive, which is a copy of it. Some collectives are in place.
_COLLECTIVES: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Any]]] = {
    "broadcast": ("n0", "nn", lambda send, recv: dist.broadcast(recv, src=0)),
    "reduce": ("nn", "n0", lambda send, recv: dist.reduce(recv, dst=0)),
    "all_reduce": ("nn", "nn", lambda send, recv: dist.all_reduce(recv)),
    "scatter": ("n0", "11", lambda send, recv: dist.scatter(recv[0], _rows_on_root(send))),
    "gather": ("11", "n0", lambda send, recv: dist.gather(send[0], _rows_on_root(recv))),
    "all_gather": ("11", "nn", lambda send, recv: dist.all_gather(list(recv), send[0])),
    "reduce_scatter": ("nn", "11", lambda send, recv: dist.reduce_scatter(recv[0], list(send))),
    "all_to_all": ("nn", "nn", lambda send, recv: dist.all_to_all_single(recv, send)),
}


def _show(name: str, device: torch.device) -> None:
    """Run a collective on rows of numbers 10 * rank + row, and print the rows of each rank."""
    rows_sent, rows_received, call = _COLLECTIVES[name]
    sent = torch.arange(dist.get_world_size(), device=device).view(-1, 1) + 10.0 * dist.get_rank()
    received = sent.clone()
    call(sent, received)
    before = gather(_format_rows(sent, rows_sent))
    after = gather(_format_rows(received, rows_received))
    _print_on_rank_0(f"\n{name}")
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        _print_on_rank_0(f"  rank {rank}  {old:{max(map(len, before))}}  ->  {new}")


def _format_rows(rows: Tensor, rows_shown: str) -> str:
    """Return the rows of this rank as a text such as `[ 10  11 ]`, or `-` if there are none."""
    n_shown = {"n": len(rows), "1": 1, "0": 0}[rows_shown[min(dist.get_rank(), 1)]]
    numbers = "".join(f"{number:3.0f} " for number in rows[:n_shown].flatten())
    return f"[{numbers}]" if numbers else "-"


def compare_all_reduces(device: torch.device, n_bytes: int) -> None:
    """Compare an all-reduce through rank 0, one around a ring, and that of the backend.

    All ranks must call this function with a buffer of at most `n_bytes` bytes on the device. For
    each all-reduce, rank 0 prints the time of the slowest rank and the bytes of the buffer per
    second. Raises a RuntimeError on a rank whose result is wrong.
    """
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    values = torch.arange(n_bytes // 4 // n_ranks * n_ranks, device=device).view(n_ranks, -1)
    values = (values % 1000).float()  # sums of small integers are exact in any order
    expected = n_ranks * values + n_ranks * (n_ranks - 1) / 2
    _print_on_rank_0(f"\nall-reduce of {values.nbytes / 2**20:6.1f} MiB   time ms    GB/s")
    ways = {"through rank 0": _reduce_by_center, "around a ring": reduce_by_ring}
    for name, all_reduce in {**ways, dist.get_backend(): dist.all_reduce}.items():
        seconds = []
        for _ in range(1 + _N_TIMED):
            result = values + rank
            dist.barrier()
            start_s = time.perf_counter()
            all_reduce(result)
            wait_for(device)
            seconds.append(time.perf_counter() - start_s)
        if not torch.equal(result, expected):
            raise RuntimeError(f"all-reduce {name}: wrong result on rank {rank}")
        slowest_s = max(gather(median(seconds[1:])))
        _print_on_rank_0(f"{name:24}{slowest_s * 1e3:10.2f}{values.nbytes / slowest_s / 1e9:8.2f}")


def _reduce_by_center(buffer: Tensor) -> None:
    """Sum a buffer over n ranks in place. Rank 0 receives n - 1 buffers and sends n - 1."""
    n_ranks = dist.get_world_size()
    received = _rows_on_root(buffer.new_empty(n_ranks, *buffer.shape))
    dist.gather(buffer, received)
    if received is not None:
        buffer.copy_(torch.stack(received).sum(0))
    dist.scatter(buffer, _rows_on_root(buffer.expand(n_ranks, *buffer.shape)))


def reduce_by_ring(buffer: Tensor) -> None:
    """Sum a buffer (n, any) over all n ranks in place, around a ring. All ranks must call it.

    In each of 2(n - 1) steps, every rank sends one row to the right and receives one from the left.
    After n - 1 steps each row is summed on one rank (reduce-scatter), after n - 1 more it is on all
    (all-gather). A rank sends 2(n - 1)/n buffers, which hardly depends on the number of ranks.
    """
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(buffer[0])
    for step in range(2 * (n_ranks - 1)):
        sent_row, row = buffer[(rank - step) % n_ranks], buffer[(rank - step - 1) % n_ranks]
        # Start both as one batch: with NCCL, ranks that all send first would wait for a receiver.
        send = dist.P2POp(dist.isend, sent_row, (rank + 1) % n_ranks)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % n_ranks)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        row.copy_(row + received if step < n_ranks - 1 else received)


def _print_on_rank_0(line: str) -> None:
    """Print a line on rank 0, and flush stdout."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
