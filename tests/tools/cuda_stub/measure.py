"""Print the allocator's peak, and the launches, events and host synchronizations of a step.

usage: WORDS="model=gpt2 trainer=gpu model.compile=none" run.sh ENV python measure.py
"""

import ctypes
import os
import sys
import tempfile
import time

import torch
from lightning.pytorch import Callback

from gptrain.assemble.run import build
from gptrain.checkpoints.lock import RunLock
from tests.command_line import compose_run, unwatched

NAMES = (
    "launches", "matrix multiplications", "stream syncs", "device syncs", "event syncs",
    "async copies", "sync copies", "mallocs", "host allocations", "event records", "event waits",
    "memsets", "nccl calls", "copies to the host",
)  # fmt: skip
N_STEPS, FIRST = 14, 4  # the first and the tenth step are logged
stub = ctypes.CDLL(os.environ["LD_PRELOAD"])


def read_counts() -> list[int]:
    """Return the counters of the stub."""
    counts = (ctypes.c_long * 32)()
    stub.stub_counts(counts)
    return list(counts)


class Measure(Callback):
    """Records the host time and the counters of each step, in a hook that acts on no step."""

    def __init__(self):
        self.rows = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        """Record the counters so far."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.rows.append((time.process_time(), read_counts()))


def main() -> None:
    """Train some steps under the stub and print what they cost."""
    sys.argv = sys.argv[:1]
    run_dir = tempfile.mkdtemp()
    words = os.environ["WORDS"].split()
    common = (f"run_dir={run_dir}", f"trainer.max_steps={N_STEPS}", "checkpoint=none")
    with RunLock(run_dir):
        cfg = compose_run(*words, *common, "callbacks=none")
        run = build(cfg, unwatched(cfg))
        measure = Measure()
        run.trainer.callbacks.append(measure)
        run.trainer.fit(run.module, datamodule=run.datamodule)
    gib = 2**30
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"peak {peak / gib:.3f} GiB allocated, {reserved / gib:.3f} GiB reserved")
    # Steps 5 to 8, which are not logged
    (begin_s, begin), (end_s, end) = measure.rows[FIRST], measure.rows[FIRST + 4]
    print(f"host {1000 * (end_s - begin_s) / 4:.1f} ms per step")
    for name, before, after in zip(NAMES, begin, end, strict=False):
        if after > before:
            print(f"{name} {(after - before) / 4:g}")


if __name__ == "__main__":
    main()
