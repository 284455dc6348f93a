"""Beside published figures: Llama 3 on many H100; and what gradients cost on more and more devices.

Sources of the rows: [1] Grattafiori et al. 2024, arXiv:2407.21783, table 4; [2] torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md; [3] its asyncTP_llama3_h100_2025-06_torchtitan.md,
plain TP. All in bf16 at 8,192 positions; MFU of [2] and [3] from tokens/s, as we count FLOPs. Their
GPUs had 500 W and 2.4 TB/s, "between SXM and NVL": counted as 835 TFLOP/s, MFU as of 989.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptrain.plan.dims import ParallelDims
from gptrain.plan.flops import train_flops_per_token
from gptrain.plan.hardware import find_device, find_link
from gptrain.plan.shape import llama_shape
from gptrain.plan.speed import Machine, estimate, machine_of
from gptrain.plan.work import Work, find_work

NAME = "fsdp_tensor_pipeline"  # no strategy of ours has all three axes
SHAPES = {
    "7B": llama_shape(32000, 4096, 32, 32, 32, 11008, 8192),
    "8B": llama_shape(128256, 4096, 32, 8, 32, 14336, 8192),
    "70B": llama_shape(128256, 8192, 64, 8, 80, 28672, 8192),
    "405B": llama_shape(128256, 16384, 128, 8, 126, 53248, 8192),
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


def scale_table() -> str:
    """Predicted and published MFU of each row, and the error."""
    device, lines = find_device("h100_sxm"), []
    links, kind = (find_link("nvlink4"), find_link("infiniband_ndr")), "bfloat16"
    cooler = replace(device, flops_per_s=find_device("h100_nvl").flops_per_s)
    cooler = replace(cooler, memory_bytes_per_s=2.4e12)
    for net, data, tensor, pipeline, batch, mode, compiles, published, source in ROWS:
        shape, dims = SHAPES[net], ParallelDims(data, tensor, pipeline)
        machine = machine_of(device if source in ("", "[1]") else cooler, 8, *links)
        options = {"reshard_after_forward": pipeline == 1, "microbatches": batch}
        options["schedule"] = "interleaved_1f1b" if pipeline > 1 else ""
        more = {"precision": "bf16-mixed", "checkpointing": mode, "compile": compiles}
        row = estimate(Work(shape, NAME, dims, batch, 8192, **more, options=options), machine)
        flops = train_flops_per_token(shape.matrix_weights, shape.n_layers, shape.d_model, 8192)
        ours, said = row["tokens_per_s"] / dims.world_size * flops / device.flops_per_s[kind], ""
        if published:
            theirs = published if published < 1 else published * flops / device.flops_per_s[kind]
            said = f"{theirs:8.1%} {ours / theirs - 1:+7.0%}  {source}"
        parts = f"{dims.world_size:6,} = {data:3} x {tensor} x {pipeline:2}"
        held = row["bytes_per_device"]["total"] / 2**30
        lines.append(f"{net:>4} {parts} {mode:>9} {held:6.1f} GiB {ours:8.1%} {said}")
    head = " net  GPUs = FSDP x TP x PP  recompute     memory      MFU published  error"
    return "\n".join([head, *lines, __doc__.partition("\n\n")[2].strip()])


def sweep_table(
    config: Mapping[str, Any], machine: Machine, counts: Sequence[int], path: Path
) -> str:
    """What gradients take of a step under ddp, by devices; written as a plot to path.

    A node has as many devices as machine.n_local, the last counts but one node where they are less.
    """
    alone = find_work(config, "ddp", config["strategy"], 1, machine.is_cpu)
    options = alone.options
    variants = {
        "as given": alone,
        "accumulate x 4": replace(alone, accumulate=4 * alone.accumulate),
        "batch x 4": replace(alone, batch_size=4 * alone.batch_size),
        "bf16 hook": replace(alone, options=options | {"comm_hook": "bf16"}),
        "buckets x 4": replace(
            alone, options=options | {"bucket_cap_mb": 4 * options.get("bucket_cap_mb", 25.0)}
        ),
    }
    shares = {}
    for name, work in variants.items():
        works = [replace(work, dims=ParallelDims(data=n)) for n in counts]
        shares[name] = [1 - estimate(one, machine)["scaling_efficiency"] for one in works]
    lines = ["part of a step that waits for gradients, by devices"]
    lines.append(f"{'':15}" + "".join(f"{n:>8}" for n in counts))
    lines += [f"{k:15}" + "".join(f"{s:8.1%}" for s in row) for k, row in shares.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plot(counts, shares))
    return "\n".join([*lines, f"plot: {path}"])


def plot(counts: Sequence[int], shares: Mapping[str, Sequence[float]]) -> str:
    """An SVG with a line for each variant; equal steps between counts, 0 to the highest share."""
    most = max(0.01, *(share for row in shares.values() for share in row))
    xs = [60 + 560 * i / max(1, len(counts) - 1) for i in range(len(counts))]
    parts = [f'<text x="{x}" y="335">{n}</text>' for x, n in zip(xs, counts, strict=True)]
    parts += [f'<text x="8" y="{310 - 280 * i / 4}">{most * i / 4:.1%}</text>' for i in range(5)]
    for i, (name, row) in enumerate(shares.items()):
        points = " ".join(f"{x},{305 - 280 * s / most:.1f}" for x, s in zip(xs, row, strict=True))
        colour = ("black", "red", "blue", "green", "orange")[i]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="70" y="{30 + 18 * i}" fill="{colour}">{name}</text>')
    style = 'font-family="sans-serif" font-size="13" style="background:white"'
    size = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 350"'
    return f"<svg {size} {style}>{''.join(parts)}</svg>\n"
