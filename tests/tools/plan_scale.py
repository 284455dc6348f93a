"""python -m tests.tools.plan_scale: compare the planner with published speeds on 8 to 128 GPUs.

191 runs of MPT of 125 M to 70 B under FSDP on A100 and H100 are in mpt_speeds.csv, from
llm-foundry, scripts/train/benchmarking/README.md: tokens/s per GPU, batch_size per micro-step.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

from gptrain.core.strategies import ParallelDims, default_options
from gptrain.costs.hardware import machine_of
from gptrain.costs.net import Net
from gptrain.costs.step import Step, estimate

# d_model, heads, layers.
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip


def mpt_errors() -> dict[str, list[tuple[float, bool]]]:
    """Return for each device the relative errors of predicted speeds, and whether runs fit."""
    errors: dict[str, list[tuple[float, bool]]] = {}
    options = default_options("fsdp").model_copy(update={"accumulate_shards": True})  # FSDP1 does
    with (Path(__file__).parent / "mpt_speeds.csv").open() as file:
        for row in csv.DictReader(file):
            d_model, n_heads, n_layers = MPT[row["net"]]
            seq_len, n_gpus, batch = (int(row[k]) for k in ("positions", "gpus", "batch_size"))
            sizes = (50368, d_model, n_heads, n_heads, n_layers, 4 * d_model)
            net = Net(*sizes, n_positions=seq_len, is_tied=True)
            network = "infiniband_ndr" if row["device"] == "h100_sxm" else "infiniband_hdr"
            machine = machine_of(row["device"], 8, network=network)
            more = {"precision": "bf16-mixed", "checkpointing": row["checkpointing"]}
            dims, accumulate = ParallelDims(n_gpus), int(row["accumulate"])
            made = estimate(Step(net, options, dims, batch, seq_len, accumulate, **more), machine)
            error = made["tokens_per_s"] / n_gpus / float(row["tokens_per_s"]) - 1
            errors.setdefault(row["device"], []).append((error, made["fits"]))
    return errors


def main() -> None:
    """Print the table."""
    print("device          runs   error: median  of its size  within 15 %  said not to fit")
    errors = mpt_errors()
    errors["all"] = [row for rows in errors.values() for row in rows]
    for device, rows in errors.items():
        middle, size = (median(f(error) for error, _ in rows) for f in (float, abs))
        near = sum(abs(error) <= 0.15 for error, _ in rows) / len(rows)
        refused = sum(not fits for _, fits in rows)
        print(f"{device:14} {len(rows):5} {middle:+15.1%} {size:12.1%} {near:12.1%} {refused:16}")


if __name__ == "__main__":
    main()
