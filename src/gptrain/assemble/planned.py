"""Estimates of the planner for the line `plan` at the start of a run."""

from typing import Any

import torch

from gptrain.core.schema import RunConfig
from gptrain.costs.choice import compare
from gptrain.costs.hardware import device_of, machine_of, this_cpu
from gptrain.runtime.devices import RunDevices


def plan_run(run: RunConfig, name: str, sample_tokens: int, devices: RunDevices) -> str:
    """Return a line with the estimated memory and speed of a run, and the best strategy.

    Args:
        run: Config of the run, with its precision resolved.
        name: Strategy of the run, such as `ddp`.
        sample_tokens: Number of positions of one sample.
        devices: Accelerator and number of ranks of the run.

    Raises:
        ValueError: If the planner does not know the net, the strategy or the GPU, or if the
            accelerator is neither a CPU nor CUDA.
    """
    if devices.accelerator == "cpu":
        machine = this_cpu(devices.n_local)
    elif devices.accelerator == "cuda" and (device := device_of(torch.cuda.get_device_name())):
        machine = machine_of(device, devices.n_local)
    else:
        raise ValueError("the device is not in the table of gptrain.costs.hardware")
    estimates: dict[str, Any] = compare(run, sample_tokens, machine, devices.n_nodes)
    if name not in estimates["strategies"]:
        raise ValueError(f"the planner has no estimate of strategy {name}")
    row = estimates["strategies"][name]
    n_bytes = row["bytes_per_device"]["total"]
    line = f"{n_bytes / 2**30:,.3g} GiB of tensors per device"
    if not row["fits"]:
        line += " (does not fit)"
    if row["step_s"] is not None:
        line += f" · {1e3 * row['step_s']:,.0f} ms per step, {row['tokens_per_s']:,.0f} tokens/s"
    return f"{line} · best: {estimates['best'] or 'nothing fits'} · {machine.source}"
