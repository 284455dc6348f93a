"""Output of a scaling-law sweep: the plan, the table of runs, ladder.json and ladder.png."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import to_json
from gptrain.ladder.law import COUNTS, LEVEL, find_best_size, fit_law, law_loss, predict_largest
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
    """Return the printed plan: steps, time and FLOPs of the sweep and of its target.

    Args:
        sizes: Smaller models, in ascending order.
        phases: Optimizer steps of the runs of each size.
        n_seeds: Number of runs of each size and length.
        target: The large model.
        tokens: Number of tokens on which the target trains.
        place: Devices of the target, such as `8 x h100_sxm`.
    """
    table = [["parameters", "steps", "time", "overrides"]]
    hours = flops = 0.0
    for size, size_phases in zip(sizes, phases, strict=True):
        n_tokens = n_seeds * size_phases.steps * size.step_tokens
        size_hours = size.hours(n_tokens)
        hours += size_hours
        flops += n_tokens * size.flops_per_token
        steps = f"{n_seeds} x {size_phases.steps:,}"
        row = [f"{size.counts['all']:,}", steps, duration(size_hours), " ".join(size.words)]
        table.append(row)
    here = f"{sizes[0].n_devices} x this machine"
    line = f"target    {target.counts['all']:,} parameters, {tokens:.4g} tokens, "
    line += f"{tokens * target.flops_per_token:.3g} FLOPs, {duration(target.hours(tokens))}"
    ladder = f"ladder    {flops:.3g} FLOPs, {duration(hours)} on {here}"
    return "\n".join([align_columns(table), ladder, f"{line} on {place}"])


def duration(hours: float) -> str:
    """Return a duration as text in days, hours, minutes or seconds, or "?" for nan.

    Args:
        hours: Duration in hours.
    """
    for unit, size in (("d", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= 2 * size:
            return f"{hours / size:,.1f} {unit}"
    return "?" if math.isnan(hours) else f"{3600 * hours:.0f} s"


def conclude(
    options: Options, points: list[dict], sizes: Sequence[Size], target: Size, tokens: float
) -> dict[str, Any]:
    """Fit the scaling law and return the content of ladder.json.

    Args:
        options: The group `ladder`.
        points: Size, tokens and loss of each run, as `train_size` returns them.
        sizes: Smaller models, in ascending order.
        target: The large model.
        tokens: Number of tokens on which the target trains.

    Returns:
        A dict of `points` (the argument), `left_out` (meaning of N -> result of `predict_largest`;
        empty for fewer than three sizes), `law` (the fitted Law), `target` (size, cost, predicted
        loss and interval of the target) and, if `options.budget` is given, `best` (the budget, and
        the best size for it, with its predicted loss and interval).
    """

    def columns(count: str) -> list[np.ndarray]:
        rows = ((point["parameters"][count], point["tokens"], point["loss"]) for point in points)
        return [np.array(column) for column in zip(*rows, strict=True)]

    predictions = {}
    if len(sizes) > 2:  # two or more sizes remain without the largest
        predictions = {count: predict_largest(*columns(count)) for count in COUNTS}
    count = options.count
    if count == "auto":
        count = min(predictions, key=lambda name: predictions[name]["error"], default="all")
    law = fit_law(count, *columns(count))
    n = target.counts[count]
    facts = {"points": points, "left_out": predictions, "law": law}
    facts["target"] = {
        "parameters": target.counts, "tokens": tokens, "flops": tokens * target.flops_per_token,
        "hours": target.hours(tokens), "devices": target.n_devices, "overrides": target.words,
        "loss": law.loss(n, tokens), "interval": law.interval(n, tokens), "level": LEVEL,
    }  # fmt: skip
    if options.budget:
        known = sorted((size.counts[count], size.flops_per_token) for size in (*sizes, target))
        best_n, best_tokens = find_best_size(law, options.budget, *zip(*known, strict=True))
        facts["best"] = {
            "flops": options.budget,
            "parameters": best_n,
            "tokens": best_tokens,
            "loss": law.loss(best_n, best_tokens),
            "interval": law.interval(best_n, best_tokens),
        }
    return facts


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Print the table of runs and the law, and write ladder.json and ladder.png.

    Args:
        folder: Folder of the sweep, which exists. Earlier files are replaced.
        facts: Result of `conclude`, whose target also has the entries `place` and `command`.

    Raises:
        OSError: If a file cannot be written.
        ModuleNotFoundError: If matplotlib is missing. ladder.json is written by then.
    """
    print("\n".join([align_columns(table_rows(facts)), *summary_lines(facts)]))
    law = facts["law"]
    content = facts | {"law": asdict(law), "constants": law.named}
    fileops.replace(folder / FILE, to_json(content))
    draw(folder / "ladder.png", facts)
    print(f"files     {folder / FILE} · {folder / 'ladder.png'}")
    print(f"next      {facts['target']['command']}")


def table_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of runs: a header, and a row with measured and predicted loss for each run.

    Args:
        facts: Result of `conclude`.
    """
    law = facts["law"]
    table = [["parameters", "tokens", "seed", "loss", "law", "off"]]
    for point in facts["points"]:
        n, tokens, loss = point["parameters"], point["tokens"], point["loss"]
        predicted = law.loss(n[law.count], tokens)
        row = [f"{n['all']:,}", f"{tokens:,}", f"{point['seed']}"]
        table.append([*row, f"{loss:.4f}", f"{predicted:.4f}", f"{predicted / loss - 1:+.2%}"])
    return table


def summary_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the printed lines about the law and its predictions.

    Args:
        facts: Result of `conclude`, whose target also has the entry `place`.
    """
    law, target, predictions = facts["law"], facts["target"], facts["left_out"]
    form = FORMS[len(law.constants)].format(**law.named)
    lines = [f"law       {form}; N: {COUNTS[law.count]}"]
    if predictions:
        largest = predictions[law.count]
        predicted, measured = largest["predicted"], largest["measured"]
        line = f"left out  the largest: {predicted:.4f}, measured {measured:.4f} "
        line += f"({predicted / measured - 1:+.2%})"
        if largest["constants"] == 2:
            line += ", by a plain power law"
        errors = (f"{count} {result['error']:.2%}" for count, result in predictions.items())
        lines.append(f"{line}; mean error by what N counts: {', '.join(errors)}")
    line = f"target    {target['parameters']['all']:,} parameters, {target['tokens']:.4g} tokens: "
    line += f"{loss_text(target)}, {target['flops']:.3g} FLOPs, {duration(target['hours'])}"
    lines.append(f"{line} on {target['place']}")
    if best := facts.get("best"):
        line = f"best      for {best['flops']:.3g} FLOPs: {best['parameters']:.3g} parameters, "
        lines.append(f"{line}{best['tokens']:.3g} tokens: {loss_text(best)}")
    return lines


def loss_text(prediction: Mapping[str, Any]) -> str:
    """Return a predicted loss and its interval as text.

    Args:
        prediction: Entries `loss` and `interval` (low, high).
    """
    low, high = prediction["interval"]
    return f"loss {prediction['loss']:.4f} ({LEVEL:.0%}: {low:.4f} to {high:.4f})"


def draw(path: Path, facts: Mapping[str, Any]) -> None:
    """Draw the losses over tokens, with the law and its interval for each size and the target.

    Args:
        path: PNG file to write.
        facts: Result of `conclude`, whose target also has the entry `place`.

    Raises:
        ModuleNotFoundError: If matplotlib is missing.
        OSError: If the file cannot be written.
    """
    from matplotlib.figure import Figure

    law, target = facts["law"], facts["target"]
    groups = {}  # number of parameters -> points of this size
    for point in (*facts["points"], target):
        groups.setdefault(point["parameters"]["all"], []).append(point)
    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (n_parameters, group) in enumerate(groups.items()):
        colour = f"C{index}"
        n = group[0]["parameters"][law.count]
        tokens = [point["tokens"] for point in group]
        losses = [point["loss"] for point in group]
        grid = np.geomspace(min(tokens) / 1.5, max(tokens) * 1.5, 60)
        low, high = np.transpose([law.interval(n, d) for d in grid])
        axes.plot(grid, law_loss(law.constants, n, grid), colour, lw=1)
        axes.fill_between(grid, low, high, color=colour, alpha=0.2, lw=0)
        name, marker = ("target, ", "*") if target in group else ("", ".")
        label = f"{name}{n_parameters / 1e6:,.3g} M parameters"
        axes.plot(tokens, losses, colour + marker, ms=9, label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="loss")
    axes.set_title(summary_lines(facts)[0], fontsize=8)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
