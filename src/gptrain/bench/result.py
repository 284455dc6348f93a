"""What the rounds say: per loop the median, and of each pair the ratio within a round."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from gptrain.bench.turns import Contestant
from gptrain.plan.flops import gpt_matrix_weights, train_flops_per_token

HEAD = (
    "loop", "tokens/s", "step ms", "CPU ms", "first s", "peak MiB", "MFU",
    "ours / it", "by CPU time", "memory",
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


@dataclass(frozen=True)
class Result:
    """One loop.

    Attributes:
        step_s, tokens_per_s: over the rounds; tokens of all ranks.
        first_step_s: from the start of its process to the end of its first step.
        peak_bytes: of the process on a CPU, of the allocator on a GPU; of the largest rank.
        mfu: model FLOPs over the matmul peak of the same round.
        cpu_step_s: processor time of a step; less than the step's where others had the processor.
        ours_ratio: tokens/s of ours over its own, per rank and in the same round.
        cpu_ratio: the same of tokens per second of processor time, which other work on the
            machine disturbs less.
        added_s, added_cpu_s: time of a step of ours over its own.
        memory_ratio: peak of ours over its own.
    """

    name: str
    n_ranks: int
    step_s: Spread
    cpu_step_s: Spread
    tokens_per_s: Spread
    first_step_s: float
    peak_bytes: int
    mfu: Spread | None
    ours_ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    added_s: Spread | None = None
    added_cpu_s: Spread | None = None
    memory_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def spread(values: list[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def summarize(contestants: list[Contestant], spec: dict[str, Any]) -> list[Result]:
    """One result per loop, the matmul peak left out: it is in the MFU of the others."""
    by_name = {contestant.name: contestant for contestant in contestants}
    ours, peaks = by_name.get("ours"), [turn["flops_per_s"] for turn in by_name["matmul"].turns]
    results = []
    for one in contestants:
        if one is by_name["matmul"]:
            continue
        step_tokens = spec["batch_size"] * (spec["seq_len"] - 1)  # of one rank
        steps_s, cpu_s = per_step(one, "seconds"), per_step(one, "cpu_seconds")
        rates = [step_tokens / step_s for step_s in steps_s]
        flops = None if one.name == "loader" else token_flops(one.name, spec)
        mfu = flops and spread([r * flops / p for r, p in zip(rates, peaks, strict=True)])
        result = Result(
            one.name,
            one.n_ranks,
            spread(steps_s),
            spread(cpu_s),
            spread([rate * one.n_ranks for rate in rates]),
            one.first_step_s,
            one.peak_bytes,
            mfu,
        )
        if ours is not None and one.name not in ("ours", "loader"):
            pairs = list(zip(steps_s, per_step(ours, "seconds"), strict=True))
            cpu_pairs = list(zip(cpu_s, per_step(ours, "cpu_seconds"), strict=True))
            result = replace(
                result,
                ours_ratio=spread([its / our for its, our in pairs]),
                cpu_ratio=spread([its / our for its, our in cpu_pairs]),
                added_s=spread([our - its for its, our in pairs]),
                added_cpu_s=spread([our - its for its, our in cpu_pairs]),
                memory_ratio=ours.peak_bytes / max(1, one.peak_bytes),
            )
        results.append(result)
    return results


def per_step(one: Contestant, key: str) -> list[float]:
    return [turn[key] / turn["steps"] for turn in one.turns]


def token_flops(name: str, spec: dict[str, Any]) -> int:
    """Model FLOPs of a token; the tutorial's layers have a second attention, on the same tokens."""
    sizes = spec["model"]
    width, layers = sizes["d_model"], sizes["n_layers"]
    weights = gpt_matrix_weights(sizes["vocab_size"], width, layers)
    attentions = layers
    if name.startswith("tutorial"):
        weights, attentions = weights + 4 * layers * width**2, 2 * layers
    return train_flops_per_token(weights, attentions, width, spec["seq_len"] - 1)


def table(results: list[Result]) -> str:
    """For people; ratios as median (lowest-highest) of the rounds."""
    rows = [HEAD]
    for result in results:
        name = result.name + (f" x {result.n_ranks}" if result.n_ranks > 1 else "")
        rows.append(
            (
                name,
                f"{result.tokens_per_s.median:,.0f}",
                f"{1e3 * result.step_s.median:.4g}",
                f"{1e3 * result.cpu_step_s.median:.4g}",
                f"{result.first_step_s:.1f}",
                f"{result.peak_bytes / 2**20:,.0f}",
                str(result.mfu or ""),
                str(result.ours_ratio or ""),
                str(result.cpu_ratio or ""),
                f"{result.memory_ratio:.2f}" if result.memory_ratio else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    for result in results:
        if result.name == "bare" and result.added_s:
            wall, cpu = 1e3 * result.added_s.median, 1e3 * result.added_cpu_s.median
            lines.append(f"ours adds {wall:.3f} ms to a bare step, {cpu:.3f} ms of processor time")
    return "\n".join(line.rstrip() for line in lines)
