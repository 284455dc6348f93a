"""What the planner says of a run, kept as plan.json, and how that compares with measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gptrain.costs.choice import compare
from gptrain.costs.hardware import device_of
from gptrain.costs.speed import machine_of, this_machine, unit_of
from gptrain.lit.perf import Peak
from gptrain.ranks.devices import Machine
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json


class Planned:
    """The estimates of all strategies, and of the one that runs.

    Of a CPU that was never measured the speed is said only when the run has measured its products.

    Raises: ValueError for a net or a machine that the planner does not know.
    """

    def __init__(self, config: dict[str, Any], name: str, sample_tokens: int, machine: Machine):
        data = {key: value for key, value in config["data"].items() if key != "num_samples"}
        self.config = config | {"data": data | {"seq_len": sample_tokens}}
        self.name, self.machine = name, machine
        self._estimate()

    def _estimate(self, flops_per_s: float | None = None) -> None:
        """Finds all, on a machine that is guessed from its fp32 products where it must be."""
        accelerator, n_local = self.machine.accelerator, self.machine.n_local
        if accelerator == "cpu":
            measured = Path(self.config["output_dir"]) / "machine.json"
            here = this_machine(measured, n_local, flops_per_s)
        elif accelerator == "cuda" and (device := device_of(torch.cuda.get_device_name())):
            here = machine_of(device, n_local)
        else:
            raise ValueError("not in the table of devices")
        self.has_speed = flops_per_s is not None or not here.is_guessed
        self.found = compare(self.config, here, self.machine.n_nodes) | {"machine": here.source}
        if self.name not in self.found["strategies"]:
            raise ValueError(f"no estimate of {self.name}")
        self.row = self.found["strategies"][self.name]
        self.n_bytes = self.row["bytes_per_device"]["total"]

    def __str__(self) -> str:
        fits, (unit, size) = "" if self.row["fits"] else " (does not fit)", unit_of(self.n_bytes)
        line = f"{self.n_bytes / size:,.1f} {unit} of tensors a device{fits}"
        if self.has_speed:
            line += f" · {1e3 * self.row['step_s']:,.0f} ms a step"
            line += f", {self.row['tokens_per_s']:,.0f} tokens/s"
        return f"{line} · best: {self.found['best'] or 'nothing fits'} · {self.found['machine']}"

    def keep(self, run_dir: Path) -> None:
        """Writes plan.json."""
        fileops.replace(run_dir / "plan.json", to_json(self.found))

    def compare(self, metrics: dict[str, float], peak: Peak | None) -> str:
        """Measured beside predicted: the time of the last logged steps, a GPU's memory; or "".

        Args:
            peak: that the run measured, of the products that it computes.
        """
        if not self.has_speed and peak and "16" not in self.config["trainer"]["precision"]:
            self._estimate(peak.flops_per_s)
        parts = []
        if self.has_speed and (real := metrics.get("perf/step_s")) is not None:
            parts.append(("a step, ms", 1e3 * real, 1e3 * self.row["step_s"]))
        if torch.cuda.is_available():
            found = torch.cuda.max_memory_allocated()
            parts.append(("tensors, MiB", found / 2**20, self.n_bytes / 2**20))
        return " · ".join(
            f"{what}: {real:,.4g}, planned {said:,.4g} ({said / real - 1:+.0%})"
            for what, real, said in parts
        )
