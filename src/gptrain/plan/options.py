"""Options of `python -m gptrain.plan`, and the machine that they describe."""

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gptrain.core.errors import BAD_CONFIG, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Section
from gptrain.costs.hardware import DEVICES, LINKS, Machine, device_of, machine_of, this_cpu
from gptrain.costs.topology import Links, find_islands, parse_topology, slowest_ring_link, speed
from gptrain.runtime.process import count_devices

DEFAULTS = {"hardware": "{name:null,link:null,network:infiniband_ndr}", "topology": "null"}


class Hardware(Section):
    """Options of the group `hardware`: the machine for which a run is planned.

    Attributes:
        name: Key of `gptrain.costs.hardware.DEVICES`. None stands for this machine.
        link: Key of LINKS: link between the GPUs of a node. None stands for that of the device.
        network: Key of LINKS: link between nodes, of each GPU.
    """

    name: Literal[tuple(DEVICES)] | None  # ty: ignore[invalid-type-form]
    link: Literal[tuple(LINKS)] | None  # ty: ignore[invalid-type-form]
    network: Literal[tuple(LINKS)]  # ty: ignore[invalid-type-form]


class PlanRun(RunConfig):
    """Keys of the command `gptrain.plan`: those of a run, and two groups about the machine.

    Attributes:
        hardware: Machine for which the run is planned.
        topology: File with the output of `nvidia-smi topo -m`, or `-` for standard input. None runs
            nvidia-smi if this machine has GPUs and the plan is for this machine.
    """

    runs_here = False
    hardware: Hardware
    topology: str | None


def find_machine(cfg: PlanRun) -> tuple[Machine, Links]:
    """Return the machine of a config, and the links between the GPUs of a node.

    The machine is the one that `hardware.name` names, or this machine. If the GPUs of this machine
    are not in the table of `gptrain.costs.hardware`, its CPU is planned. There are no links if the
    key `topology` is null, and `hardware.name` is set or this machine has no GPUs.
    """
    hardware, source = cfg.hardware, cfg.topology
    name, local_gpus = hardware.name, []
    if not name and cfg.trainer.accelerator != "cpu":
        local_gpus = nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        name = device_of(local_gpus[0]) if local_gpus else None
    n_local = count_devices(cfg.trainer.devices) or len(local_gpus)
    if not name:
        return this_cpu(n_local or 1), {}
    if not n_local:
        message = "devices of another machine cannot be counted"
        raise ConfigError.of("trainer.devices", "auto", message, hint="trainer.devices=8")
    machine = machine_of(name, n_local, hardware.link, hardware.network)
    text = nvidia_smi("topo", "-m") if local_gpus else ""
    try:
        if source:
            text = sys.stdin.read() if source == "-" else Path(source).read_text()
        links = parse_topology(text) if source or text else {}
    except (OSError, ValueError) as error:
        code = INPUT_NOT_FOUND if isinstance(error, OSError) else BAD_CONFIG
        raise ConfigError.of("topology", source, str(error), code=code) from error
    if (slowest := slowest_ring_link(links)) and speed(slowest) < 0:
        # Only some GPUs have NVLinks to each other. Rings through more GPUs use PCIe.
        island = max(map(len, find_islands(links)))
        machine = replace(machine, island=island, host=LINKS["pcie4"])
    return machine, links


def nvidia_smi(*arguments: str) -> str:
    """Run nvidia-smi and return its output, or an empty string if it is missing, fails or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["nvidia-smi", *arguments], text=True, timeout=20, stderr=subprocess.DEVNULL
        )
    return ""
