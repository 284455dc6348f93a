"""What a ladder says: its plan, a table, ladder.json, ladder.png."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import to_json
from gptrain.ladder.law import COUNTS, LEVEL, best_for, fit_law, law_loss, left_out
from gptrain.ladder.options import Options
from gptrain.ladder.sizes import Phases, Size
from gptrain.runs.table import align_columns

FILE = "ladder.json"
FORMS = {
    5: "L = {E:.4g} + {A:.4g} N^-{a:.3g} + {B:.4g} D^-{b:.3g}",
    2: "L = {A:.4g} (N D)^-{a:.3g}, as the runs are too few for a law of N and D",
}


def plan_table(
    sizes: Sequence[Size], phases: Sequence[Phases], n_seeds: int, target: Size, tokens: float,
    place: str,
) -> str:  # fmt: skip
    """What the ladder and its target take."""
    table, hours, flops = [["parameters", "steps", "time", "overrides"]], 0.0, 0.0
    for size, parts in zip(sizes, phases, strict=True):
        n_tokens = n_seeds * parts.steps * size.step_tokens
        hours, flops = hours + size.hours(n_tokens), flops + n_tokens * size.flops_per_token
        steps, time = f"{n_seeds} x {parts.steps:,}", duration(size.hours(n_tokens))
        table.append([f"{size.counts['all']:,}", steps, time, " ".join(size.words)])
    here = f"{sizes[0].n_devices} x this machine"
    line = f"target    {target.counts['all']:,} parameters, {tokens:.4g} tokens, "
    line += f"{tokens * target.flops_per_token:.3g} FLOPs, {duration(target.hours(tokens))}"
    ladder = f"ladder    {flops:.3g} FLOPs, {duration(hours)} on {here}"
    return "\n".join([align_columns(table), ladder, f"{line} on {place}"])


def duration(hours: float) -> str:
    """For people; ? for nan."""
    for unit, size in (("d", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= 2 * size:
            return f"{hours / size:,.1f} {unit}"
    return "?" if math.isnan(hours) else f"{3600 * hours:.0f} s"


def conclude(
    options: Options, points: list[dict], sizes: Sequence[Size], target: Size, tokens: float
) -> dict[str, Any]:
    """Fit the scaling law and return the content of ladder.json, in which the law is a `Law`."""

    def columns(count: str) -> list[np.ndarray]:
        rows = ((one["parameters"][count], one["tokens"], one["loss"]) for one in points)
        return [np.array(column) for column in zip(*rows, strict=True)]

    tried = {count: left_out(*columns(count)) for count in COUNTS} if len(sizes) > 2 else {}
    count = options.count
    if count == "auto":
        count = min(tried, key=lambda name: tried[name]["error"], default="all")
    law = fit_law(count, *columns(count))
    n = target.counts[count]
    facts = {"points": points, "left_out": tried, "law": law}
    facts["target"] = {
        "parameters": target.counts, "tokens": tokens, "flops": tokens * target.flops_per_token,
        "hours": target.hours(tokens), "devices": target.n_devices, "overrides": target.words,
        "loss": law.loss(n, tokens), "interval": law.interval(n, tokens), "level": LEVEL,
    }  # fmt: skip
    if options.budget:
        nets = sorted((one.counts[count], one.flops_per_token) for one in (*sizes, target))
        best = best_for(law, options.budget, *zip(*nets, strict=True))
        said = {"loss": law.loss(*best), "interval": law.interval(*best)}
        facts["best"] = {"flops": options.budget, "parameters": best[0], "tokens": best[1], **said}
    return facts


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Print the tables and write ladder.json and ladder.png."""
    print("\n".join([align_columns(rows(facts)), *lines(facts)]))
    law = facts["law"]
    content = facts | {"law": asdict(law), "constants": law.named}
    fileops.replace(folder / FILE, to_json(content))
    draw(folder / "ladder.png", facts)
    print(f"files     {folder / FILE} · {folder / 'ladder.png'}")
    print(f"next      {facts['target']['command']}")


def rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """A head, and a row for each run."""
    law, found = facts["law"], [["parameters", "tokens", "seed", "loss", "law", "off"]]
    for one in facts["points"]:
        n, tokens, real = one["parameters"], one["tokens"], one["loss"]
        said = law.loss(n[law.count], tokens)
        sizes = f"{n['all']:,}", f"{tokens:,}", f"{one['seed']}"
        found.append([*sizes, f"{real:.4f}", f"{said:.4f}", f"{said / real - 1:+.2%}"])
    return found


def lines(facts: Mapping[str, Any]) -> list[str]:
    """What the law says."""
    law, target, tried = facts["law"], facts["target"], facts["left_out"]
    form = FORMS[len(law.constants)].format(**law.named)
    found = [f"law       {form}; N: {COUNTS[law.count]}"]
    if tried:
        one = tried[law.count]
        off = one["predicted"] / one["measured"] - 1
        line = f"left out  the largest: {one['predicted']:.4f}, measured {one['measured']:.4f} "
        line += f"({off:+.2%}){', by a plain power law' if one['constants'] == 2 else ''}; "
        each = (f"{count} {one['error']:.2%}" for count, one in tried.items())
        found.append(f"{line}mean error by what N counts: {', '.join(each)}")
    line = f"target    {target['parameters']['all']:,} parameters, {target['tokens']:.4g} tokens: "
    line += prediction(target) + f", {target['flops']:.3g} FLOPs, {duration(target['hours'])}"
    found.append(f"{line} on {target['place']}")
    if best := facts.get("best"):
        line = f"best      for {best['flops']:.3g} FLOPs: {best['parameters']:.3g} parameters, "
        found.append(f"{line}{best['tokens']:.3g} tokens: {prediction(best)}")
    return found


def prediction(said: Mapping[str, Any]) -> str:
    """A loss and its interval."""
    low, high = said["interval"]
    return f"loss {said['loss']:.4f} ({LEVEL:.0%}: {low:.4f} to {high:.4f})"


def draw(path: Path, facts: Mapping[str, Any]) -> None:
    """Loss over tokens: a colour for each size, the law's lines and intervals, the target."""
    from matplotlib.figure import Figure

    law, target, groups = facts["law"], facts["target"], {}
    for one in (*facts["points"], target):
        groups.setdefault(one["parameters"]["all"], []).append(one)
    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, (whole, group) in enumerate(groups.items()):
        tokens, n = [one["tokens"] for one in group], group[0]["parameters"][law.count]
        grid = np.geomspace(min(tokens) / 1.5, max(tokens) * 1.5, 60)
        (low, high), colour = np.transpose([law.interval(n, d) for d in grid]), f"C{place}"
        axes.plot(grid, law_loss(law.constants, n, grid), colour, lw=1)
        axes.fill_between(grid, low, high, color=colour, alpha=0.2, lw=0)
        said, mark = ("target, ", "*") if target in group else ("", ".")
        label, losses = f"{said}{whole / 1e6:,.3g} M parameters", [one["loss"] for one in group]
        axes.plot(tokens, losses, colour + mark, ms=9, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="loss")
    axes.set_title(lines(facts)[0], fontsize=8)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
