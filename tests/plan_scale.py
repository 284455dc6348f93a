"""python -m tests.plan_scale: compare the planner with published speeds on 1 to 16,384 GPUs.

191 runs of MPT of 125 M to 70 B under FSDP on 8 to 128 A100 and H100 are in mpt_speeds.csv, from
llm-foundry, scripts/train/benchmarking/README.md: tokens/s per GPU, batch_size per micro-step. The
three errors are the quartiles.

Sources of the other rows: [1] Grattafiori et al. 2024, arXiv:2407.21783, table 4; [2] torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md; [3] its asyncTP_llama3_h100_2025-06_torchtitan.md,
plain TP. All are in bf16 at 8,192 positions. The MFU of [2] and [3] is computed from tokens/s with
gptrain's FLOPs. Their GPUs had 500 W and 2.4 TB/s, "between SXM and NVL": the prediction uses 835
TFLOP/s, and the MFU is relative to 989. The pipelines are interleaved with two stages per rank, as
in gptrain; [1] does not name its number of stages.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

from gptrain.core.strategies import (
    STRATEGIES,
    ParallelDims,
    PipelineOptions,
    ShardedOptions,
    default_options,
)
from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.hardware import DEVICES, LINKS
from gptrain.costs.machine import machine_of
from gptrain.costs.shape import DecoderShape, llama_shape
from gptrain.costs.speed import estimate
from gptrain.costs.strategies import FSDPTensorParallelCosts, PipelineCosts
from gptrain.costs.work import Work

T = 8192
NAME = "fsdp_tensor_pipeline"  # no strategy of gptrain has all three axes
SHAPES = {
    "7B": llama_shape(32000, 4096, 32, 32, 32, 11008),
    "8B": llama_shape(128256, 4096, 32, 8, 32, 14336),
    "70B": llama_shape(128256, 8192, 64, 8, 80, 28672),
    "405B": llama_shape(128256, 16384, 128, 8, 126, 53248),
}
# Net, data x tensor x pipeline, sequences of a data rank, checkpointing, compile,
# published tokens/s of a GPU or MFU, source.
ROWS = (
    ("7B", 8, 1, 1, 2, "selective", "blocks", None, ""),
    ("8B", 8, 1, 1, 2, "selective", "none", 5762, "[2] table 1"),
    ("8B", 8, 1, 1, 2, "selective", "blocks", 6667, "[2] table 1"),
    ("8B", 8, 8, 1, 12, "selective", "blocks", 4378, "[3]"),
    ("8B", 128, 1, 1, 2, "selective", "none", 5605, "[2] table 3"),
    ("8B", 128, 1, 1, 2, "selective", "blocks", 6514, "[2] table 3"),
    ("70B", 8, 8, 1, 4, "full", "blocks", None, ""),
    ("70B", 32, 8, 1, 16, "full", "blocks", 597.3, "[3]"),
    ("70B", 512, 8, 1, 4, "full", "blocks", None, ""),
    ("405B", 8, 8, 8, 32, "full", "blocks", None, ""),
    ("405B", 64, 8, 16, 32, "none", "blocks", 0.43, "[1]"),
    ("405B", 128, 8, 16, 16, "none", "blocks", 0.41, "[1]"),
)
# d_model, heads, layers.
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24),
    "3b": (2560, 20, 32), "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}  # fmt: skip


FSDP = default_options("fsdp")


class Mixed(ShardedOptions, PipelineOptions):
    """Options of FSDP in pipelines, which gptrain does not have and published runs do."""


class MixedCosts(FSDPTensorParallelCosts, PipelineCosts):
    """Costs of FSDP in pipelines."""


def mpt_errors() -> dict[str, list[tuple[float, bool]]]:
    """Return for each device the relative errors of predicted speeds, and whether runs fit."""
    errors: dict[str, list[tuple[float, bool]]] = {}
    with (Path(__file__).parent / "mpt_speeds.csv").open() as file:
        for row in csv.DictReader(file):
            d_model, n_heads, n_layers = MPT[row["net"]]
            seq_len, n_gpus, batch = (int(row[k]) for k in ("positions", "gpus", "batch_size"))
            sizes = (50368, d_model, n_heads, n_heads, n_layers, 4 * d_model)
            shape = DecoderShape(*sizes, n_positions=seq_len, is_tied=True)
            network = "ndr" if row["device"] == "h100_sxm" else "hdr"
            machine = machine_of(DEVICES[row["device"]], 8, None, LINKS[f"infiniband_{network}"])
            more = {"precision": "bf16-mixed", "checkpointing": row["checkpointing"]}
            options = FSDP.model_copy(update={"accumulate_shards": True})  # FSDP1 does
            dims, accumulate = ParallelDims(n_gpus), int(row["accumulate"])
            work = Work(shape, options, dims, batch, seq_len, accumulate, **more)
            made = estimate(work, machine)
            error = made["tokens_per_s"] / n_gpus / float(row["tokens_per_s"]) - 1
            errors.setdefault(row["device"], []).append((error, made["fits"]))
    return errors


def predict(row: tuple) -> tuple[float, float | None, float]:
    """Return predicted and published MFU, relative to 989 TFLOP/s, and predicted bytes of a GPU."""
    net, data, tensor, pipeline, batch, mode, compiles, published, source = row
    shape, dims, device = SHAPES[net], ParallelDims(data, tensor, pipeline), DEVICES["h100_sxm"]
    if source[:3] in ("[2]", "[3]"):
        cooler = DEVICES["h100_nvl"].flops_per_s
        device = replace(device, flops_per_s=cooler, memory_bytes_per_s=2.4e12)
    machine = machine_of(device, 8, LINKS["nvlink4"], LINKS["infiniband_ndr"])
    options = FSDP.model_copy(update={"reshard_after_forward": pipeline == 1})
    if pipeline > 1:
        update = {"microbatches": batch, "schedule": "interleaved_1f1b", "name": NAME}
        of_pipeline = default_options("pipeline").plain()
        options = Mixed.model_construct(**of_pipeline | dict(options) | update)
    more = {"precision": "bf16-mixed", "checkpointing": mode, "compile": compiles}
    prediction = estimate(Work(shape, options, dims, batch, T, **more), machine)
    flops = train_flops_per_token(shape.matrix_weights, shape.n_layers, shape.d_model, T)
    mfu = prediction["tokens_per_s"] / dims.world_size * flops / 989e12
    published_mfu = published * flops / 989e12 if published and published > 1 else published
    return mfu, published_mfu, prediction["bytes_per_device"]["total"]


def main() -> None:
    """Print both tables."""
    STRATEGIES[NAME] = replace(STRATEGIES["fsdp"], costs=f"{__name__}:MixedCosts")
    print("device          runs   error of the speed     within 15 %  said not to fit")
    for device, rows in mpt_errors().items():
        low, middle, high = quantiles((error for error, _ in rows), n=4)
        near = sum(abs(error) <= 0.15 for error, _ in rows) / len(rows)
        refused = sum(not fits for _, fits in rows)
        print(f"{device:14} {len(rows):5} {low:+7.1%} {middle:+6.1%} {high:+6.1%} {near:14.0%}"
              f" {refused:16}")  # fmt: skip
    print()
    print(" net  GPUs = FSDP x TP x PP  recompute     memory      MFU published  error")
    for row in ROWS:
        net, data, tensor, pipeline, _, mode, *_, source = row
        mfu, published_mfu, n_bytes = predict(row)
        comparison = (
            f"{published_mfu:8.1%} {mfu / published_mfu - 1:+7.0%}  {source}"
            if published_mfu
            else ""
        )
        n_gpus = data * tensor * pipeline
        print(f"{net:>4} {n_gpus:6,} = {data:3} x {tensor} x {pipeline:2} {mode:>9}"
              f" {n_bytes / 2**30:6.1f} GiB {mfu:8.1%} {comparison}")  # fmt: skip
    print(__doc__.partition("\n\n")[2].strip())


if __name__ == "__main__":
    main()
