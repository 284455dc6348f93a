"""What a ladder says: its plan, a table, ladder.json, ladder.png."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gptrain.ladder.sizes import Phases, Size
from gptrain.law import COUNTS, FILE, LEVEL, Law, best_for, fit_law, left_out
from gptrain.problems import ConfigError
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json

FORMS = {
    5: "L = {E:.4g} + {A:.4g} N^-{a:.3g} + {B:.4g} D^-{b:.3g}",
    2: "L = {A:.4g} (N D)^-{a:.3g}, as the runs are too few for a law of N and D",
}


def plan_table(
    sizes: Sequence[Size], phases: Sequence[Phases], n_seeds: int, target: Size, tokens: float,
    place: str,
) -> str:  # fmt: skip
    """What the ladder and its target take."""
    lines, hours, flops = [f"{'parameters':>12} {'steps':>12} {'time':>8}  overrides"], 0.0, 0.0
    for size, parts in zip(sizes, phases, strict=True):
        n_tokens = n_seeds * parts.steps * size.step_tokens
        hours, flops = hours + size.hours(n_tokens), flops + n_tokens * size.flops_per_token
        row = f"{size.counts['all']:12,} {f'{n_seeds} x {parts.steps:,}':>12} "
        lines.append(f"{row}{duration(size.hours(n_tokens)):>8}  {' '.join(size.words)}")
    here = f"{sizes[0].n_devices} x this machine"
    lines.append(f"ladder    {flops:.3g} FLOPs, {duration(hours)} on {here}")
    line = f"target    {target.counts['all']:,} parameters, {tokens:.4g} tokens, "
    line += f"{tokens * target.flops_per_token:.3g} FLOPs, {duration(target.hours(tokens))}"
    return "\n".join([*lines, f"{line} on {place}"])


def duration(hours: float) -> str:
    """For people; ? for nan."""
    for unit, size in (("d", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= 2 * size:
            return f"{hours / size:,.1f} {unit}"
    return f"{3600 * hours:.0f} s" if hours == hours else "?"


def conclude(
    options: Any, points: list[dict], sizes: Sequence[Size], target: Size, tokens: float
) -> dict[str, Any]:
    """All that ladder.json holds; its laws as Law.

    Raises: ConfigError for dollars where the target's speed is not known.
    """

    def columns(count: str, what: str = "") -> list[np.ndarray]:
        rows = ((p["parameters"][count], p[f"{what}tokens"], p[f"{what}loss"]) for p in points)
        return [np.array(column) for column in zip(*rows, strict=True)]

    tried = {count: left_out(*columns(count)) for count in COUNTS} if len(sizes) > 2 else {}
    count, stable = options.count, None
    if count == "auto":
        count = min(tried, key=lambda name: tried[name]["error"], default="all")
    law = fit_law(count, *columns(count))
    if all(one["stable_loss"] is not None for one in points):
        stable = fit_law(count, *columns(count, "stable_"))
    n, flops = target.counts[count], options.budget
    said = {"loss": law.loss(n, tokens), "interval": law.interval(n, tokens), "level": LEVEL}
    facts = {"points": points, "left_out": tried, "law": law, "stable": stable}
    facts["target"] = said | {
        "parameters": target.counts, "tokens": tokens, "flops": tokens * target.flops_per_token,
        "hours": target.hours(tokens), "devices": target.n_devices, "overrides": target.words,
    }  # fmt: skip
    if options.dollars:
        if target.row is None:
            wrong = "the speed of this net is not known"
            raise ConfigError.of("ladder.dollars", options.dollars, wrong, attempt="ladder.budget")
        device_tokens_per_s = target.row["tokens_per_s"] / target.n_devices
        seconds = options.dollars / options.price * 3600
        flops = seconds * device_tokens_per_s * target.flops_per_token
    if flops:
        nets = sorted((one.counts[count], one.flops_per_token) for one in (*sizes, target))
        best = best_for(law, flops, *zip(*nets, strict=True))
        keys = ("flops", "parameters", "tokens", "loss", "interval")
        values = (flops, *best, law.loss(*best), law.interval(*best))
        facts["best"] = dict(zip(keys, values, strict=True))
    return facts


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Prints the tables, writes ladder.json and the picture."""
    print("\n".join([*rows(facts), *lines(facts)]))
    laws = {key: facts[key] and asdict(facts[key]) for key in ("law", "stable")}
    fileops.replace(folder / FILE, to_json(facts | laws | {"constants": facts["law"].named}))
    picture = folder / "ladder.png"
    if find_spec("matplotlib") is None:
        picture = "no picture: pip install matplotlib"
    else:
        draw(picture, facts)
    print(f"files     {folder / FILE} · {picture}\nnext      {facts['target']['command']}")


def rows(facts: Mapping[str, Any]) -> list[str]:
    """A row for each size and number of tokens, over all seeds."""
    law, found = facts["law"], [f"{'parameters':>12} {'tokens':>10} {'loss':>8} {'law':>8}  off"]
    groups: dict[tuple[int, int], list[dict]] = {}
    for one in facts["points"]:
        groups.setdefault((one["parameters"]["all"], one["tokens"]), []).append(one)
    for (n, tokens), group in groups.items():
        real = sum(one["loss"] for one in group) / len(group)
        said = law.loss(group[0]["parameters"][law.count], tokens)
        found.append(f"{n:12,} {tokens:10,} {real:8.4f} {said:8.4f}  {said / real - 1:+.2%}")
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
    line += told(target) + f", {target['flops']:.3g} FLOPs, {duration(target['hours'])}"
    found.append(f"{line} on {target['place']}")
    if best := facts.get("best"):
        line = f"best      for {best['flops']:.3g} FLOPs: {best['parameters']:.3g} parameters, "
        found.append(f"{line}{best['tokens']:.3g} tokens: {told(best)}")
    return found


def told(said: Mapping[str, Any]) -> str:
    low, high = said["interval"]
    return f"loss {said['loss']:.4f} ({LEVEL:.0%}: {low:.4f} to {high:.4f})"


def draw(path: Path, facts: Mapping[str, Any]) -> None:
    """Loss over tokens: a colour for each size, the law's lines and intervals, the target."""
    from matplotlib.figure import Figure

    law: Law = facts["law"]
    figure, groups = Figure((7, 4.5), layout="constrained"), {}
    axes = figure.subplots()
    for one in (*facts["points"], facts["target"]):
        groups.setdefault(one["parameters"]["all"], []).append(one)
    for place, (whole, group) in enumerate(groups.items()):
        tokens, n = [one["tokens"] for one in group], group[0]["parameters"][law.count]
        grid = np.geomspace(min(tokens) / 1.5, max(tokens) * 1.5, 60)
        (low, high), colour = np.transpose([law.interval(n, d) for d in grid]), f"C{place}"
        axes.plot(grid, [law.loss(n, d) for d in grid], colour, lw=1)
        axes.fill_between(grid, low, high, color=colour, alpha=0.2, lw=0)
        is_target = facts["target"] in group
        label = f"{'target, ' * is_target}{whole / 1e6:,.3g} M parameters"
        losses = [one["loss"] for one in group]
        axes.plot(tokens, losses, colour + ("*" if is_target else "."), ms=9, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="loss")
    axes.set_title(lines(facts)[0], fontsize=8)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
