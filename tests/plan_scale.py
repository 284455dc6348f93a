"""python -m tests.plan_scale: the planner beside published speeds of Llama 3 on 8 to 16,384 H100.

Sources of the rows: [1] Grattafiori et al. 2024, arXiv:2407.21783, table 4; [2] torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md; [3] its asyncTP_llama3_h100_2025-06_torchtitan.md,
plain TP. All in bf16 at 8,192 positions; MFU of [2] and [3] from tokens/s, as we count FLOPs. Their
GPUs had 500 W and 2.4 TB/s, "between SXM and NVL": counted as 835 TFLOP/s, MFU as of 989. The
pipelines are interleaved with two stages a rank, as ours; what [1] had in a rank it does not say.
"""

from __future__ import annotations

from dataclasses import replace

from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.hardware import DEVICES, LINKS
from gptrain.costs.shape import llama_shape
from gptrain.costs.speed import estimate, machine_of
from gptrain.costs.work import Work
from gptrain.parallel.dims import ParallelDims

T = 8192
NAME = "fsdp_tensor_pipeline"  # no strategy of ours has all three axes
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


def predict(row: tuple) -> tuple[float, float | None, float]:
    """Predicted and published MFU, of 989 TFLOP/s, and the predicted bytes of a GPU."""
    net, data, tensor, pipeline, batch, mode, compiles, published, source = row
    shape, dims, device = SHAPES[net], ParallelDims(data, tensor, pipeline), DEVICES["h100_sxm"]
    if source[:3] in ("[2]", "[3]"):
        cooler = DEVICES["h100_nvl"].flops_per_s
        device = replace(device, flops_per_s=cooler, memory_bytes_per_s=2.4e12)
    machine = machine_of(device, 8, LINKS["nvlink4"], LINKS["infiniband_ndr"])
    options = {"reshard_after_forward": pipeline == 1, "microbatches": batch}
    options["schedule"] = "interleaved_1f1b" if pipeline > 1 else ""
    more = {"precision": "bf16-mixed", "checkpointing": mode, "compile": compiles}
    found = estimate(Work(shape, NAME, dims, batch, T, **more, options=options), machine)
    flops = train_flops_per_token(shape.matrix_weights, shape.n_layers, shape.d_model, T)
    ours = found["tokens_per_s"] / dims.world_size * flops / 989e12
    theirs = published * flops / 989e12 if published and published > 1 else published
    return ours, theirs, found["bytes_per_device"]["total"]


def main() -> None:
    """Prints the table."""
    print(" net  GPUs = FSDP x TP x PP  recompute     memory      MFU published  error")
    for row in ROWS:
        net, data, tensor, pipeline, _, mode, *_, source = row
        ours, theirs, n_bytes = predict(row)
        said = f"{theirs:8.1%} {ours / theirs - 1:+7.0%}  {source}" if theirs else ""
        n_gpus = data * tensor * pipeline
        print(f"{net:>4} {n_gpus:6,} = {data:3} x {tensor} x {pipeline:2} {mode:>9}"
              f" {n_bytes / 2**30:6.1f} GiB {ours:8.1%} {said}")  # fmt: skip
    print(__doc__.partition("\n\n")[2].strip())


if __name__ == "__main__":
    main()
