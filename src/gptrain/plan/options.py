"""Options of `python -m gptrain.plan`, and the machine that they describe."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Section
from gptrain.costs.hardware import DEVICES, LINKS, device_of
from gptrain.costs.machine import DamagedMeasurementError, Machine, machine_of, this_machine
from gptrain.costs.topology import Topology, nvidia_smi, read_topology, speed
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


def expand_hardware(words: Iterable[str]) -> list[str]:
    """Return overrides in which `hardware.name=X` replaces the short form `hardware=X`.

    Args:
        words: Overrides that the user typed.
    """
    return [re.sub("^hardware=", "hardware.name=", word) for word in words]


def find_machine(cfg: PlanRun) -> tuple[Machine, Topology | None]:
    """Return the machine of a config and the topology of its nodes.

    The machine is the one that `hardware.name` names, or this machine. If the GPUs of this machine
    are not in the table of `gptrain.costs.hardware`, its CPU is planned. The topology is None if
    the key `topology` is null, and `hardware.name` is set or this machine has no GPUs.

    Args:
        cfg: Configuration of the command.

    Raises:
        ConfigError: If the number of devices is not known, or if machine.json or the topology
            cannot be read.
    """
    hardware, trainer = cfg.hardware, cfg.trainer
    local_gpus = []
    device = DEVICES.get(hardware.name)
    if not device and trainer.accelerator != "cpu":
        local_gpus = nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        device = device_of(local_gpus[0]) if local_gpus else None
    n_local = count_devices(trainer.devices) or len(local_gpus)
    if not device:
        try:
            machine = this_machine(Path(cfg.output_dir), n_local or 1)
        except DamagedMeasurementError as error:
            raise ConfigError.of("output_dir", cfg.output_dir, str(error), code=BAD_DATA) from None
    elif not n_local:
        message = "devices of another machine cannot be counted"
        raise ConfigError.of("trainer.devices", "auto", message, hint="trainer.devices=8")
    else:
        link, network = LINKS.get(hardware.link), LINKS[hardware.network]
        machine = machine_of(device, n_local, link, network)
    source = cfg.topology
    try:
        topology = read_topology(source) if source or local_gpus else None
    except ValueError as error:
        raise ConfigError.of("topology", source, str(error)) from error
    except OSError as error:
        message = str(error.strerror)
        raise ConfigError.of("topology", source, message, code=INPUT_NOT_FOUND) from error
    if topology and (slowest := topology.slowest_ring_link) and speed(slowest) < 0:
        # Only some GPUs have NVLinks to each other. Rings through more GPUs use PCIe.
        island = max(map(len, topology.tensor_groups))
        machine = replace(machine, island=island, host=LINKS["pcie4"])
    return machine, topology


def resolve_precision(cfg: PlanRun, machine: Machine) -> PlanRun:
    """Return the config with a precision in place of `trainer.precision=auto`.

    It is `bf16-mixed` if the machine has GPUs that compute bf16 natively, else `32-true`. Another
    precision is not changed.

    Args:
        cfg: Configuration of the command.
        machine: Machine for which the run is planned.
    """
    if cfg.trainer.precision != "auto":
        return cfg
    is_native = machine.has_bf16 and not machine.is_cpu
    return cfg.changed({"trainer.precision": "bf16-mixed" if is_native else "32-true"})
