"""What gradient synchronisation takes of a step under ddp, on more and more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gptrain.plan.dims import ParallelDims
from gptrain.plan.speed import Machine, estimate
from gptrain.plan.work import Work


def sweep(work: Work, machine: Machine, counts: Sequence[int]) -> dict[str, list[float]]:
    """Part of a step that waits for gradients, by number of devices, and what makes it less."""
    options, bucket = work.options, work.options.get("bucket_cap_mb", 25.0)
    variants = {
        "as given": work,
        "accumulate x 4": replace(work, accumulate=4 * work.accumulate),
        "batch x 4": replace(work, batch_size=4 * work.batch_size),
        "bf16 hook": replace(work, options={**options, "comm_hook": "bf16"}),
        "buckets x 4": replace(work, options={**options, "bucket_cap_mb": 4 * bucket}),
    }
    return {
        name: [
            1 - estimate(replace(one, dims=ParallelDims(data=n)), machine)["scaling_efficiency"]
            for n in counts
        ]
        for name, one in variants.items()
    }


def table(counts: Sequence[int], shares: Mapping[str, Sequence[float]]) -> str:
    """For people."""
    lines = ["devices        " + "".join(f"{n:>8}" for n in counts)]
    lines += [f"{k:15}" + "".join(f"{s:8.1%}" for s in row) for k, row in shares.items()]
    return "\n".join(["part of a step that waits for gradients", *lines])


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
