"""What the planner says of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gptrain.core.schema import RunConfig
from gptrain.costs.choice import compare
from gptrain.costs.hardware import device_of
from gptrain.costs.speed import machine_of, this_machine, unit_of
from gptrain.runtime.devices import RunDevices


def plan_run(
    run: RunConfig, name: str, sample_tokens: int, machine: RunDevices
) -> tuple[str, dict[str, Any]]:
    """The start's line of the strategy that runs, and the estimates of all, for plan.json.

    Raises: ValueError for a net or a machine that the planner does not know;
    DamagedMeasurementError.
    """
    if machine.accelerator == "cpu":
        here = this_machine(Path(run.output_dir), machine.n_local)
    elif machine.accelerator == "cuda" and (device := device_of(torch.cuda.get_device_name())):
        here = machine_of(device, machine.n_local)
    else:
        raise ValueError("not in the table of devices")
    found: dict[str, Any] = compare(run, sample_tokens, here, machine.n_nodes)
    found["machine"] = here.source
    if name not in found["strategies"]:
        raise ValueError(f"no estimate of {name}")
    row = found["strategies"][name]
    n_bytes = row["bytes_per_device"]["total"]
    unit, size = unit_of(n_bytes)
    line = f"{n_bytes / size:,.1f} {unit} of tensors a device"
    if not row["fits"]:
        line += " (does not fit)"
    if row["step_s"] is not None:
        line += f" · {1e3 * row['step_s']:,.0f} ms a step, {row['tokens_per_s']:,.0f} tokens/s"
    return f"{line} · best: {found['best'] or 'nothing fits'} · {here.source}", found
