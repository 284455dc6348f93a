"""What the planner says of a run, kept as plan.json, and how that compares with measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gptrain.launch.devices import Machine
from gptrain.plan.choice import compare
from gptrain.plan.hardware import device_of
from gptrain.plan.speed import machine_of, this_machine, unit_of
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json


class Planned:
    """The estimates of all strategies, and of the one that runs.

    Raises: ValueError for a net or a machine that the planner does not know.
    """

    def __init__(self, config: dict[str, Any], name: str, sample_tokens: int, machine: Machine):
        data = {key: value for key, value in config["data"].items() if key != "num_samples"}
        config = config | {"data": data | {"seq_len": sample_tokens}}
        here = this_machine(Path(config["output_dir"]) / "machine.json", machine.n_local)
        if machine.accelerator != "cpu":
            device = machine.accelerator == "cuda" and device_of(torch.cuda.get_device_name())
            if not device:
                raise ValueError("not in the table of devices")
            here = machine_of(device, machine.n_local)
        self.found = compare(config, here, machine.n_nodes) | {"machine": here.source}
        if name not in self.found["strategies"]:
            raise ValueError(f"no estimate of {name}")
        self.row = self.found["strategies"][name]
        self.n_bytes = self.row["bytes_per_device"]["total"]

    def __str__(self) -> str:
        fits, (unit, size) = "" if self.row["fits"] else " (does not fit)", unit_of(self.n_bytes)
        return (
            f"{self.n_bytes / size:,.1f} {unit} of tensors a device{fits} · "
            f"{1e3 * self.row['step_s']:,.3g} ms a step, {self.row['tokens_per_s']:,.0f} tokens/s"
            f" · best: {self.found['best'] or 'nothing fits'} · {self.found['machine']}"
        )

    def keep(self, run_dir: Path) -> None:
        """Writes plan.json."""
        fileops.replace(run_dir / "plan.json", to_json(self.found))

    def compare(self, metrics: dict[str, float]) -> str:
        """Measured beside predicted: the time of the last logged steps, a GPU's memory."""
        parts = []
        if (real := metrics.get("perf/step_s")) is not None:
            parts.append(("a step, ms", 1e3 * real, 1e3 * self.row["step_s"]))
        if torch.cuda.is_available():
            found = torch.cuda.max_memory_allocated()
            parts.append(("tensors, MiB", found / 2**20, self.n_bytes / 2**20))
        return " · ".join(
            f"{what}: {real:,.4g}, planned {said:,.4g} ({said / real - 1:+.0%})"
            for what, real, said in parts
        )
