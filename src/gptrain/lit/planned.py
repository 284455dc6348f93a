"""What the planner says of a run, kept as plan.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gptrain.costs.choice import compare
from gptrain.costs.hardware import device_of
from gptrain.costs.speed import machine_of, this_machine, unit_of
from gptrain.ranks.devices import Machine
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json


class Planned:
    """The estimates of all strategies, and of the one that runs.

    Raises: ValueError for a net or a machine that the planner does not know; DamagedMeasurement.
    """

    def __init__(self, config: dict[str, Any], name: str, sample_tokens: int, machine: Machine):
        if machine.accelerator == "cpu":
            here = this_machine(Path(config["output_dir"]), machine.n_local)
        elif machine.accelerator == "cuda" and (device := device_of(torch.cuda.get_device_name())):
            here = machine_of(device, machine.n_local)
        else:
            raise ValueError("not in the table of devices")
        found = compare(config, sample_tokens, here, machine.n_nodes)
        if name not in found["strategies"]:
            raise ValueError(f"no estimate of {name}")
        self.found, self.row = found | {"machine": here.source}, found["strategies"][name]

    def __str__(self) -> str:
        n_bytes = self.row["bytes_per_device"]["total"]
        fits, (unit, size) = "" if self.row["fits"] else " (does not fit)", unit_of(n_bytes)
        line = f"{n_bytes / size:,.1f} {unit} of tensors a device{fits}"
        if self.row["step_s"] is not None:
            line += f" · {1e3 * self.row['step_s']:,.0f} ms a step"
            line += f", {self.row['tokens_per_s']:,.0f} tokens/s"
        return f"{line} · best: {self.found['best'] or 'nothing fits'} · {self.found['machine']}"

    def keep(self, run_dir: Path) -> None:
        """Writes plan.json."""
        fileops.replace(run_dir / "plan.json", to_json(self.found))
