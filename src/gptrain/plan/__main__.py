"""What a run will take before it starts: memory, time and traffic under every strategy.

    python -m gptrain.plan model=gpt2 trainer.devices=8 hardware=h100_sxm
    python -m gptrain.plan model=gpt_7b trainer.devices=8 trainer.num_nodes=8 max_tokens=1e11 \\
        hardware=h100_sxm hardware.link=nvlink4 hardware.network=infiniband_ndr

    hardware         a device of gptrain.costs.hardware; null: this machine
    hardware.link    within a node; null: the device's own
    topology         a file with what `nvidia-smi topo -m` prints, or - for a pipe
    --json           everything, for programs
    --doctor         what is wrong with this machine for such a run, each line with its fix
    --trace          one step of the real code under the config's strategy, on tensors without
                     numbers, in place of the formulas; of any other net than ours that is the plan
    --measure        time and bandwidth of the collectives between trainer.devices (2) ranks here,
                     up to max_bytes (16 MiB), and what a CPU computes; kept in machine.json of
                     output_dir, by which this machine is planned. Under torchrun, too
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gptrain import config
from gptrain.collectives.command import DEFAULTS as OPTIONS
from gptrain.collectives.command import CollectivesRun, default_devices
from gptrain.core import shell
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Section
from gptrain.costs.choice import changed_overrides, compare
from gptrain.costs.hardware import DEVICES, LINKS, device_of
from gptrain.costs.machine import DamagedMeasurementError, Machine, machine_of, this_machine
from gptrain.costs.speed import unit_of
from gptrain.costs.topology import Topology, nvidia_smi, read_topology, speed
from gptrain.plan.doctor import doctor
from gptrain.runs.table import align_columns
from gptrain.runtime.process import count_devices, count_nodes

FLAGS = ("--json", "--doctor", "--trace", "--measure")
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "total")
CHOSEN = ("strategy", "trainer.devices")  # what is best among those that fit
DEFAULTS = {"hardware": "{name:null,link:null,network:infiniband_ndr}", "topology": "null"}


class Hardware(Section):
    name: Literal[tuple(DEVICES)] | None  # ty: ignore[invalid-type-form]
    link: Literal[tuple(LINKS)] | None  # ty: ignore[invalid-type-form]
    network: Literal[tuple(LINKS)]  # ty: ignore[invalid-type-form]


class PlanRun(RunConfig):
    """A run's keys and the command's own."""

    runs_here = False
    hardware: Hardware
    topology: str | None


def main() -> None:
    """The command line, in which hardware=… stands for hardware.name."""
    flags = set(FLAGS) & set(sys.argv)
    words = [word for word in sys.argv[1:] if word not in FLAGS]
    if "--measure" in flags:
        sys.argv[1:] = ["name=measure", default_devices(), *words]
        config.main(measure, CollectivesRun, OPTIONS, usage=__doc__)
    sys.argv[1:] = words = expand_hardware(words)
    config.main(lambda cfg: plan(cfg, words, flags), PlanRun, DEFAULTS, usage=__doc__)


def expand_hardware(words: Iterable[str]) -> list[str]:
    """The words, with hardware.name=… for hardware=…."""
    return [f"hardware.name={w[9:]}" if w.startswith("hardware=") else w for w in words]


def measure(cfg: CollectivesRun) -> None:
    """Starts the ranks that measure, or is one of those that torchrun started."""
    from gptrain import runtime  # here: a plan needs no torch
    from gptrain.plan.measure import measure

    runtime.run(measure, cfg, lambda *_: None)


def plan(cfg: PlanRun, words: list[str], flags: set[str]) -> None:
    """Prints what the flags ask for.   Raises: ConfigError."""
    trainer, as_json = cfg.trainer, "--json" in flags
    if "--doctor" in flags:
        n_local, backend = count_devices(trainer.devices), cfg.strategy.backend
        lines = doctor(n_local, count_nodes(trainer.num_nodes), trainer.accelerator, backend)
        print(json.dumps(lines, indent=1) if as_json else "\n".join(lines))
        return
    machine, topology = find_machine(cfg)
    cfg = resolve_precision(cfg, machine)
    found = compare(cfg, cfg.data.sample_tokens, machine, count_nodes(trainer.num_nodes))
    if "--trace" in flags or not found["strategies"]:
        found, lines_of = traced(cfg, machine), traced_lines
    else:
        typed = [word for word in words if not word.startswith(("hardware", "topology"))]
        changes = found["changes"]
        found["command"] = changes and shell.train_command(*changed_overrides(typed, changes))
        if topology:
            islands, slowest = topology.islands, topology.slowest_ring_link
            found["topology"] = {"islands": islands, "slowest_ring_link": slowest}
        lines_of = partial(planned_lines, topology)
    found["machine"] = {"name": machine.name, "source": machine.source}
    print(json.dumps(found, indent=1) if as_json else "\n".join(lines_of(found)))


def traced(cfg: PlanRun, machine: Machine) -> dict[str, Any]:
    """The traced step of any net, as `compare` gives estimates.   Raises: ConfigError."""
    from gptrain.plan.trace import trace  # here: it imports torch and Lightning

    found = trace(cfg, machine.n_local * count_nodes(cfg.trainer.num_nodes), cfg.data.sample_tokens)
    for row in found["strategies"].values():
        total = row["bytes_per_device"]["total"] * machine.n_local**machine.is_cpu
        row["fits"] = total <= machine.memory_bytes
    return found | {"traced": True}


def find_machine(cfg: PlanRun) -> tuple[Machine, Topology | None]:
    """The machine that a config names, or this one, and how it is wired.   Raises: ConfigError."""
    hardware, trainer = cfg.hardware, cfg.trainer
    here, device = [], DEVICES.get(hardware.name)
    if not device and trainer.accelerator != "cpu":
        here = nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        device = device_of(here[0]) if here else None
    n_local = count_devices(trainer.devices) or len(here)
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
        topology = read_topology(source) if source or here else None
    except ValueError as error:
        raise ConfigError.of("topology", source, str(error)) from error
    except OSError as error:
        message = str(error.strerror)
        raise ConfigError.of("topology", source, message, code=INPUT_NOT_FOUND) from error
    if topology and (slowest := topology.slowest_ring_link) and speed(slowest) < 0:
        island = max(map(len, topology.tensor_groups))
        machine = replace(machine, island=island, host=LINKS["pcie4"])
    return machine, topology


def resolve_precision(cfg: PlanRun, machine: Machine) -> PlanRun:
    """Return the config with the precision that `auto` means on a machine."""
    if cfg.trainer.precision != "auto":
        return cfg
    return cfg.changed({"trainer.precision": "bf16-mixed" if machine.has_bf16 else "32-true"})


def planned_lines(topology: Topology | None, found: dict[str, Any]) -> list[str]:
    """For people: what a device holds, what a step takes, and what is best."""
    rows, changes, lines = found["strategies"], found["changes"], held_lines(found)
    if all(row["step_s"] is not None for row in rows.values()):
        lines += step_lines(rows)
    if topology and topology.gpus:
        line = f"topology  tensor parallelism inside {topology.tensor_groups}"
        lines.append(f"{line}, slowest link of a ring {topology.slowest_ring_link}")
    if not changes:
        return [*lines, "best      nothing fits: more devices, or a smaller model"]
    needed = [f"{key}={changes[key]}" for key in changes if key not in CHOSEN]
    with_what = f"; nothing fits as typed, but with {' '.join(needed)}" if needed else ""
    return [*lines, f"best      {found['best']}{with_what}", f"command   {found['command']}"]


def traced_lines(found: dict[str, Any]) -> list[str]:
    """For people: what a device holds, computes and sends."""
    (row,) = found["strategies"].values()
    sent = (f"{what} {n_bytes / 2**20:,.1f} MiB" for what, n_bytes in row["wire"].items())
    line = f"a step    {row['flops'] / 1e12:,.4g} TFLOP of a device, traced"
    lines = [*held_lines(found), f"{line}; sent: {', '.join(sent) or 'nothing'}"]
    if found["layers"]:
        few, more, count = found["layers"]
        lines.append(f"layers    of {count}; {few} and {more} were traced, each more adds the same")
    return lines


def held_lines(found: dict[str, Any]) -> list[str]:
    """What a device holds."""
    machine, rows = found["machine"], found["strategies"]
    unit, size = unit_of(max(row["bytes_per_device"]["total"] for row in rows.values()))
    cells = [[f"{unit} of a device", *PARTS, "fits"]]
    for name, row in rows.items():
        held = (f"{row['bytes_per_device'][part] / size:.2f}" for part in PARTS)
        cells.append([name, *held, "yes" if row["fits"] else "no"])
    head = f"{found['parameters'] / 1e6:,.1f} M parameters, {machine['name']}"
    return [f"{head} ({machine['source']})", align_columns(cells)]


def step_lines(rows: dict[str, Any]) -> list[str]:
    """What a step takes."""
    unit, size = unit_of(max(row["wire_bytes_per_step"] for row in rows.values()))
    cells = [["a step", "seconds", "tokens/s", "MFU", f"{unit} sent", "hidden s", "shown s",
              "scaling", "hours", "device hours", "most over"]]  # fmt: skip
    for name, row in rows.items():
        wire, hidden_s = row["wire"], row["overlapped_s"]
        cells.append([
            name, f"{row['step_s']:.4g}", f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%}",
            f"{row['wire_bytes_per_step'] / size:.2f}", f"{hidden_s:.3g}",
            f"{row['communication_s'] - hidden_s:.3g}", f"{row['scaling_efficiency']:.1%}",
            *(f"{row[key]:,.1f}" if key in row else "-" for key in ("hours", "device_hours")),
            max(wire, key=wire.get).rpartition(" ")[2] if wire else "-",
        ])  # fmt: skip
    return [align_columns(cells)]


if __name__ == "__main__":
    main()
