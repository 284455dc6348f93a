"""What the planner says of a run, kept as plan.json, and how that compares with measurement."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gptrain.launch.devices import Machine
from gptrain.plan.choice import compare
from gptrain.plan.hardware import device_of, find_link
from gptrain.plan.speed import machine_of, this_machine
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json

MIB = 2**20


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
            links = find_link(device.link), find_link("infiniband_ndr")
            here = machine_of(device, machine.n_local, *links)
        self.found = compare(config, here, machine.n_nodes) | {"machine": here.source}
        if name not in self.found["strategies"]:
            raise ValueError(f"no estimate of {name}")
        self.row, self.before_bytes = self.found["strategies"][name], 0
        self.n_bytes = self.row["bytes_per_device"]["total"]
        with suppress(OSError):  # Linux alone
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            weights = self.row["bytes_per_device"]["weights"]  # which are here already
            self.before_bytes = pages * resource.getpagesize() - weights

    def __str__(self) -> str:
        fits = "" if self.row["fits"] else " (does not fit)"
        best = self.found["best"] or "nothing"
        return (
            f"{self.n_bytes / MIB:,.0f} MiB of tensors a device{fits} · "
            f"{1e3 * self.row['step_s']:,.3g} ms a step, {self.row['tokens_per_s']:,.0f} tokens/s"
            f" · fastest that fits: {best} · {self.found['machine']}"
        )

    def keep(self, run_dir: Path) -> None:
        """Writes plan.json."""
        fileops.replace(run_dir / "plan.json", to_json(self.found))

    def compare(self, metrics: dict[str, float]) -> str:
        """Measured beside predicted: memory, and the time of the last steps that were logged."""
        found = [("tensors, MiB", torch.cuda.max_memory_allocated() / MIB, self.n_bytes / MIB)]
        if not torch.cuda.is_available():
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.before_bytes
            found = [("the process grew by, MiB", most / MIB, self.n_bytes / MIB)]
            found *= self.before_bytes > 0
        if "perf/step_s" in metrics:
            found.append(("a step, ms", 1e3 * metrics["perf/step_s"], 1e3 * self.row["step_s"]))
        return " · ".join(
            f"{what}: {real:,.4g}, planned {said:,.4g} ({said / real - 1:+.0%})"
            for what, real, said in found
        )
