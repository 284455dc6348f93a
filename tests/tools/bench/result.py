"""Summarize the rounds: the median of each loop, and ratios of loops within a round."""

from __future__ import annotations

from collections.abc import Iterable
from operator import sub, truediv
from statistics import median
from typing import Any

from tests.tools.bench.turns import Contestant


def summarize(contestants: list[Contestant], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one result per loop.

    Returns:
        Dicts with these keys. The last three compare gptrain's loop with this loop:
        step_s: Seconds per step.
        tokens_per_s: Tokens per second of all ranks.
        mfu: Model FLOP/s of gptrain's net, relative to the peak of the ranks' devices. It is
            missing if the FLOPs of the net are unknown.
        peak_bytes: Peak memory of the largest rank: of the process on a CPU, of torch's allocator
            on a GPU.
        ours_ratio: Ratio of tokens per second in the same round.
        added_s: Difference of the seconds per step.
        memory_ratio: Ratio of the peak memory.
    """
    ours = next((contestant for contestant in contestants if contestant.name == "ours"), None)
    step_tokens = spec["batch_size"] * (spec["seq_len"] - 1)  # tokens of one rank
    results = []
    for contestant in contestants:
        result = {
            "name": contestant.name,
            "n_ranks": contestant.n_ranks,
            "step_s": over_rounds(contestant.steps_s),
            "tokens_per_s": over_rounds(
                contestant.n_ranks * step_tokens / s for s in contestant.steps_s
            ),
            "peak_bytes": contestant.peak_bytes,
        }
        if spec["flops_per_token"] is not None:
            rank_tokens_per_s = result["tokens_per_s"]["median"] / contestant.n_ranks
            result["mfu"] = rank_tokens_per_s * spec["flops_per_token"] / spec["peak_flops_per_s"]
        if ours not in (None, contestant):
            result |= {
                "ours_ratio": over_rounds(map(truediv, contestant.steps_s, ours.steps_s)),
                "added_s": over_rounds(map(sub, ours.steps_s, contestant.steps_s)),
                "memory_ratio": ours.peak_bytes / max(1, contestant.peak_bytes),
            }
        results.append(result)
    return results


def over_rounds(values: Iterable[float]) -> dict[str, float]:
    """Return the median, the smallest and the largest value of the rounds."""
    values = list(values)
    return {"median": median(values), "low": min(values), "high": max(values)}


def table(results: list[dict[str, Any]]) -> str:
    """Return a table with ratios as median (lowest-highest) of the rounds."""
    lines = []
    for result in results:
        name = result["name"] + (f" x {result['n_ranks']}" if result["n_ranks"] > 1 else "")
        lines.append(
            f"{name:12}  {result['tokens_per_s']['median']:11,.0f} tokens/s"
            f"  {1e3 * result['step_s']['median']:9.4g} ms"
            + (f"  {result['mfu']:6.1%} MFU" if "mfu" in result else "")
            + f"  {result['peak_bytes'] / 2**20:7,.0f} MiB"
        )
        if "ours_ratio" in result:
            ratio, added_ms = result["ours_ratio"], 1e3 * result["added_s"]["median"]
            lines[-1] += (
                f"  ours: {ratio['median']:.3g} ({ratio['low']:.3g}-{ratio['high']:.3g}) x its"
                f" tokens/s, {added_ms:+.3f} ms, {result['memory_ratio']:.2f} x its memory"
            )
    return "\n".join(lines)
