"""python -m tests.tools.plan_scale: compare the planner with published speeds on 8 to 256 GPUs.

191 runs of MPT of 125 M to 70 B under FSDP on 8 to 128 A100 and H100 are in mpt_speeds.csv, from
llm-foundry, scripts/train/benchmarking/README.md: tokens/s per GPU, batch_size per micro-step. The
three errors are the quartiles.

Sources of the other rows: [1] torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; [2] its
asyncTP_llama3_h100_2025-06_torchtitan.md, plain TP. All are in bf16 at 8,192 positions. The MFU is
computed from tokens/s with gptrain's FLOPs. Their GPUs had 500 W and 2.4 TB/s, "between SXM and
NVL": the prediction uses 835 TFLOP/s, and the MFU is relative to 989.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

from gptrain.core.strategies import ParallelDims, default_options
from gptrain.costs.hardware import machine_of
from gptrain.costs.net import Net, train_flops_per_token
from gptrain.costs.step import Step, estimate

T = 8192
NETS = {
    "8B": Net(128256, 4096, 32, 8, 32, 14336, is_gated=True),
    "70B": Net(128256, 8192, 64, 8, 80, 28672, is_gated=True),
}
# Net, data x tensor, sequences of a data rank, checkpointing, compile, tokens/s of a GPU, source.
ROWS = (
    ("8B", 8, 1, 2, "selective", "none", 5762, "[1] table 1"),
    ("8B", 8, 1, 2, "selective", "blocks", 6667, "[1] table 1"),
    ("8B", 8, 8, 12, "selective", "blocks", 4378, "[2]"),
    ("8B", 128, 1, 2, "selective", "none", 5605, "[1] table 3"),
    ("8B", 128, 1, 2, "selective", "blocks", 6514, "[1] table 3"),
    ("70B", 32, 8, 16, "full", "blocks", 597.3, "[2]"),
)
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
    """Print both tables."""
    print("device          runs   error of the speed     median within 15 %  said not to fit")
    errors = mpt_errors()
    errors["all"] = [row for rows in errors.values() for row in rows]
    for device, rows in errors.items():
        low, middle, high = quantiles((error for error, _ in rows), n=4)
        near = sum(abs(error) <= 0.15 for error, _ in rows) / len(rows)
        size = median(abs(error) for error, _ in rows)
        refused = sum(not fits for _, fits in rows)
        print(f"{device:14} {len(rows):5} {low:+7.1%} {middle:+6.1%} {high:+6.1%} {size:9.1%}"
              f" {near:11.1%} {refused:16}")  # fmt: skip
    print("\n net  GPUs = FSDP x TP  recompute     memory      MFU published  error")
    machine = machine_of("h100_sxm", 8)
    speeds = {"bfloat16": machine.matmul * 835e12, "float32": 1.0}
    machine = replace(machine, flops_per_s=speeds, memory_bytes_per_s=0.8 * 2.4e12)
    for name, data, tensor, batch, mode, compiles, tokens_per_s, source in ROWS:
        net, dims = NETS[name], ParallelDims(data, tensor)
        more = {"precision": "bf16-mixed", "checkpointing": mode, "compile": compiles}
        made = estimate(Step(net, default_options("fsdp"), dims, batch, T, **more), machine)
        flops = train_flops_per_token(net.matrix_weights, net.n_layers, net.d_q, T) / 989e12
        planned, published = made["tokens_per_s"] / dims.world_size * flops, tokens_per_s * flops
        print(f"{name:>4} {dims.world_size:6,} = {data:3} x {tensor} {mode:>14}"
              f" {made['bytes_per_device']['total'] / 2**30:6.1f} GiB {planned:8.1%}"
              f" {published:8.1%} {planned / published - 1:+7.0%}  {source}")  # fmt: skip
    print(__doc__.partition("\n\n")[2].strip())


if __name__ == "__main__":
    main()
