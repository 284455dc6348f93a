"""What gradient synchronisation takes of a step under ddp, on more and more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptrain.costs.speed import Machine, estimate
from gptrain.costs.work import find_work
from gptrain.parallel.dims import ParallelDims


def report(values: dict[str, Any], machine: Machine, asked: str) -> str:
    """A table of it by number of devices, and what makes it less; writes the plot.

    Raises: ValueError if `asked` is not such as 1,2,8.
    """
    counts = [int(n) if n.isdigit() else 0 for n in asked.split(",")]
    if 0 in counts:
        raise ValueError("not a list of numbers of devices, such as 1,2,4,8,64,512")
    work = find_work(values, "ddp", 1, machine.is_cpu)
    options, bucket = work.options, work.options.get("bucket_cap_mb", 25.0)
    variants = {
        "as given": work,
        "accumulate x 4": replace(work, accumulate=4 * work.accumulate),
        "batch x 4": replace(work, batch_size=4 * work.batch_size),
        "bf16 hook": replace(work, options={**options, "comm_hook": "bf16"}),
        "buckets x 4": replace(work, options={**options, "bucket_cap_mb": 4 * bucket}),
    }
    shares, lines = {}, ["devices        " + "".join(f"{n:>8}" for n in counts)]
    for name, one in variants.items():
        each = [estimate(replace(one, dims=ParallelDims(data=n)), machine) for n in counts]
        shares[name] = [1 - found["scaling_efficiency"] for found in each]
        lines.append(f"{name:15}" + "".join(f"{share:8.1%}" for share in shares[name]))
    path = Path(values["output_dir"]) / "gradient-synchronisation.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plot(counts, shares))
    return "\n".join(["part of a step that waits for gradients", *lines, f"plot: {path}"])


def plot(counts: Sequence[int], shares: Mapping[str, Sequence[float]]) -> str:
    """An SVG with a line for each variant; equal steps between counts, 0 to the highest share."""
    most = max(0.01, *(share for row in shares.values() for share in row))
    xs = [60 + 560 * i / max(1, len(counts) - 1) for i in range(len(counts))]
    parts = [f'<text x="{x:.0f}" y="335">{n}</text>' for x, n in zip(xs, counts, strict=True)]
    parts += [f'<text x="8" y="{310 - 70 * i}">{most * i / 4:.1%}</text>' for i in range(5)]
    for i, (name, row) in enumerate(shares.items()):
        points = (f"{x:.0f},{305 - 280 * s / most:.1f}" for x, s in zip(xs, row, strict=True))
        colour = ("black", "red", "blue", "green", "orange")[i]
        line = f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'
        parts.append(f'{line}<text x="70" y="{30 + 18 * i}" fill="{colour}">{name}</text>')
    style = 'font-family="sans-serif" font-size="13" style="background:white"'
    size = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 350"'
    return f"<svg {size} {style}>{''.join(parts)}</svg>\n"
