"""What the rounds say: per loop the median, and of each pair the ratio within a round."""

from __future__ import annotations

from collections.abc import Iterable
from operator import sub, truediv
from statistics import median
from typing import Any

from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.shape import gpt_shape
from tests.bench.turns import Contestant


def summarize(
    contestants: list[Contestant], spec: dict[str, Any], peaks: list[float]
) -> list[dict[str, Any]]:
    """One result per loop.

    step_s: seconds of a step.   tokens_per_s: of all ranks.
    first_step_s: from the start of its process to the end of its first step.
    peak_bytes: of the process on a CPU, of the allocator on a GPU; of the largest rank.
    mfu: model FLOPs over those of matrix products of the same round.
    ours_ratio: tokens/s of ours over its own, per rank and in the same round.
    added_s: time of a step of ours over its own.
    memory_ratio: peak of ours over its own.
    """
    ours = next((one for one in contestants if one.name == "ours"), None)
    step_tokens = spec["batch_size"] * (spec["seq_len"] - 1)  # of one rank
    results = []
    for one in contestants:
        step_flops = step_tokens * token_flops(one.name, spec)
        result = {
            "name": one.name,
            "n_ranks": one.n_ranks,
            "step_s": over_rounds(one.steps_s),
            "tokens_per_s": over_rounds(one.n_ranks * step_tokens / s for s in one.steps_s),
            "first_step_s": one.first_step_s,
            "peak_bytes": one.peak_bytes,
            "mfu": over_rounds(
                step_flops / s / peak for s, peak in zip(one.steps_s, peaks, strict=True)
            ),
        }
        if ours not in (None, one):
            result |= {
                "ours_ratio": over_rounds(map(truediv, one.steps_s, ours.steps_s)),
                "added_s": over_rounds(map(sub, ours.steps_s, one.steps_s)),
                "memory_ratio": ours.peak_bytes / max(1, one.peak_bytes),
            }
        results.append(result)
    return results


def over_rounds(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest and largest of the rounds."""
    values = list(values)
    return {"median": median(values), "low": min(values), "high": max(values)}


def token_flops(name: str, spec: dict[str, Any]) -> int:
    """Model FLOPs of a token; the tutorial's layers have a second attention, on the same tokens."""
    width, attentions = spec["model"]["d_model"], spec["model"]["n_layers"]
    sizes = {key: size for key, size in spec["model"].items() if key != "dropout"}
    weights = gpt_shape(**sizes).matrix_weights
    if name == "tutorial":
        weights, attentions = weights + 4 * attentions * width**2, 2 * attentions
    return train_flops_per_token(weights, attentions, width, spec["seq_len"] - 1)


def table(results: list[dict[str, Any]]) -> str:
    """For people; ratios as median (lowest-highest) of the rounds."""
    lines = []
    for one in results:
        name = one["name"] + (f" x {one['n_ranks']}" if one["n_ranks"] > 1 else "")
        lines.append(
            f"{name:12}  {one['tokens_per_s']['median']:11,.0f} tokens/s"
            f"  {1e3 * one['step_s']['median']:9.4g} ms  {one['peak_bytes'] / 2**20:7,.0f} MiB"
            f"  MFU {one['mfu']['median']:.2f}  first step {one['first_step_s']:.1f} s"
        )
        if "ours_ratio" in one:
            ratio, added_ms = one["ours_ratio"], 1e3 * one["added_s"]["median"]
            lines[-1] += (
                f"  ours: {ratio['median']:.3g} ({ratio['low']:.3g}-{ratio['high']:.3g}) x its"
                f" tokens/s, {added_ms:+.3f} ms, {one['memory_ratio']:.2f} x its memory"
            )
    return "\n".join(lines)
