"""Compare strategies of two nodes on a slow network: DDP, compressed gradients, and DiLoCo.

python -m tests.slow_network               50 and 200 Mbit/s, all rows: 40 minutes on two cores
python -m tests.slow_network 50 ddp H=32   one rate, the rows whose name has one of these words

The net of quickstart is trained with twice its tokens, with one process in each of two network
namespaces. tc limits the cable between them. Bytes are those on the cable, and times do not include
the start and validations. Needs root. PowerSGD has no row, because it sends uncompressed gradients
in its first 1,000 steps, and a run has 640.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tempfile
from pathlib import Path

from tests.nodes import two_nodes

TARGET = 1.6  # nats
STEPS, EVERY = 640, 64
# Replicas continue from their mean, at the learning rate and momentum that suit half of the batch.
# Nesterov momentum of 0.9 needs more than the twenty to eighty synchronizations of such a run.
MEAN = (
    "strategy=diloco strategy.outer_lr=1 strategy.outer_momentum=0 strategy.outer_dtype=bf16 "
    "optimizer.lr=0.006 optimizer.momentum=0.9 strategy.sync_every="
)
ROWS = {
    "ddp": "strategy=ddp",
    "ddp, lr=0.006": "strategy=ddp optimizer.lr=0.006",
    "ddp, bf16 hook": "strategy=ddp strategy.comm_hook=bf16",
    "diloco, H=8": "strategy=diloco strategy.sync_every=8",
    "diloco, H=32": "strategy=diloco strategy.sync_every=32",
    "diloco, H=128": "strategy=diloco strategy.sync_every=128",
    "mean, H=8": f"{MEAN}8",
    "mean, H=25": f"{MEAN}25",
    "mean, H=32": f"{MEAN}32",
}
WORDS = (
    "experiment=quickstart", "trainer.devices=1", "trainer.num_nodes=auto", "data.batch_size=8",
    f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "logger=csv", "~callbacks.sample",
    "checkpoint=none", "trainer.enable_progress_bar=false", "trainer.limit_val_batches=8",
)  # fmt: skip


def race(words: str, mbit_per_s: float, folder: Path) -> dict[str, float]:
    """Run on both nodes: return tokens/s, bytes per step of a node, val/loss, seconds to TARGET."""
    log, sync_every = folder / "log", int((re.findall(r"sync_every=(\d+)", words) or [1])[0])
    every = -(-EVERY // sync_every) * sync_every  # a validation synchronizes, too
    words = (*WORDS, *words.split(), f"trainer.val_check_interval={every}")
    with two_nodes(mbit_per_s) as nodes:
        agents = [node.start(log, *words, f"run_dir={folder / 'run'}") for node in nodes]
        if any(agent.wait(3000) for agent in agents):
            sys.exit(log.read_text()[:6000])
        sent = max(node.sent_bytes() for node in nodes)
    with open(folder / "run" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    seconds, before, reached = 0.0, None, float("inf")
    for row in rows:
        seconds += float(row["perf/step_s"] or 0)
        if row["val/loss"]:
            now = float(row["val/loss"]), seconds
            if now[0] <= TARGET and reached == float("inf"):
                (high, start), (low, end) = before or (now[0], 0.0), now
                part = (high - TARGET) / (high - low) if high > low else 1
                reached = start + part * (end - start)
            before = now
    result = json.loads((folder / "run" / "result.json").read_text())
    return {
        "tokens_per_s": result["tokens"] / seconds, "bytes": sent / STEPS,
        "loss": result["metrics"]["val/loss"], "seconds": reached,
    }  # fmt: skip


def main() -> None:
    rates = [int(word) for word in sys.argv[1:] if word.isdigit()] or [50, 200]
    words = [word for word in sys.argv[1:] if not word.isdigit()]
    for rate in rates:
        print(f"{rate} Mbit/s        tokens/s  MB a step  val/loss  s to {TARGET}", flush=True)
        for name, row in ROWS.items():
            if words and not any(word in name for word in words):
                continue
            with tempfile.TemporaryDirectory() as folder:
                result = race(row, rate, Path(folder))
            print(
                f"{name:16}{result['tokens_per_s']:10,.0f}{result['bytes'] / 1e6:11.3f}"
                f"{result['loss']:10.4f}{result['seconds']:10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
