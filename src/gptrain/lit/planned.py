"""What the planner said of a run, kept as plan.json, and how it compares with what was measured."""

from __future__ import annotations

import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptrain.launch.devices import Machine
from gptrain.plan.batch import Lengths
from gptrain.plan.choice import compare
from gptrain.plan.dims import strategy_name
from gptrain.plan.hardware import device_of, find_link
from gptrain.plan.speed import machine_of, this_machine
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json

PLAN_NAME = "plan.json"
MIB = 2**20


@dataclass(frozen=True)
class Planned:
    """The estimates of all strategies, and of the one that runs.

    Attributes:
        before_bytes: of this process, without its weights, when the run was built; None if unknown.
    """

    found: dict[str, Any]
    row: dict[str, Any]
    source: str
    before_bytes: float | None

    def __str__(self) -> str:
        row, n_bytes = self.row, self.row["bytes_per_device"]["total"]
        best = self.found["best"]
        parts = [
            f"{n_bytes / MIB:,.0f} MiB of tensors a device" + " (does not fit)" * (not row["fits"]),
            f"{1e3 * row['step_s']:,.3g} ms a step, {row['tokens_per_s']:,.0f} tokens/s",
            f"fastest that fits: {best}" if best else "no strategy fits",
            self.source,
        ]
        return " · ".join(parts)

    def keep(self, run_dir: Path) -> None:
        """Writes plan.json."""
        facts = {**self.found, "machine": {"source": self.source}}
        fileops.replace(run_dir / PLAN_NAME, to_json(facts))

    def compare(self, metrics: dict[str, float]) -> str:
        """Measured beside predicted: memory, and the time of the last steps that were logged."""
        parts, planned = [], self.row["bytes_per_device"]["total"]
        if torch.cuda.is_available():
            parts.append(("memory", torch.cuda.max_memory_allocated() / MIB, planned / MIB, "MiB"))
        elif self.before_bytes is not None:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.before_bytes
            parts.append(("the process grew by", most / MIB, planned / MIB, "MiB"))
        if "perf/step_s" in metrics:
            parts.append(("step", 1e3 * metrics["perf/step_s"], 1e3 * self.row["step_s"], "ms"))
        return " · ".join(
            f"{what} {real:,.4g} {unit}, planned {said:,.4g} ({said / real - 1:+.0%})"
            for what, real, said, unit in parts
            if real > 0
        )


def plan_run(config: dict[str, Any], machine: Machine, lengths: Lengths) -> Planned | None:
    """The plan of a run that is built; None for a net without a shape.

    Args:
        config: as plain values, its precision resolved.
    """
    data = {key: value for key, value in config["data"].items() if key != "num_samples"}
    config = config | {"data": data | {"seq_len": lengths.sample_tokens}}
    device = device_of(torch.cuda.get_device_name()) if machine.accelerator == "cuda" else None
    if device is not None:
        links = find_link(device.link), find_link("infiniband_ndr")
        here = machine_of(device, machine.n_local, *links)
    elif machine.accelerator == "cpu":
        here = this_machine(Path(config["output_dir"]) / "machine.json", machine.n_local)
    else:
        return None
    found = compare(config, here, machine.n_nodes)
    row = found["strategies"].get(strategy_name(config["strategy"]["name"], machine.world_size))
    if row is None:
        return None
    before = None
    with suppress(OSError):  # Linux alone
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        before = pages * resource.getpagesize() - row["bytes_per_device"]["weights"]
    return Planned(found, row, here.source, before)
