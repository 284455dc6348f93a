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
from pathlib import Path
from typing import Any, Literal, cast

from omegaconf import DictConfig, OmegaConf

from gptrain import config
from gptrain.collectives.__main__ import DEFAULTS as OPTIONS
from gptrain.collectives.__main__ import CollectivesRun, default_devices
from gptrain.config.compose import plain
from gptrain.config.data_schema import sample_tokens
from gptrain.config.kinds import Closed
from gptrain.config.schema import Run
from gptrain.costs.choice import command_line, compare
from gptrain.costs.hardware import DEVICES, LINKS, device_of
from gptrain.costs.speed import DamagedMeasurement, Machine, machine_of, this_machine, unit_of
from gptrain.costs.topology import Topology, nvidia_smi, read_topology, speed
from gptrain.plan.doctor import doctor
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.ranks.process import count_devices

FLAGS = ("--json", "--doctor", "--trace", "--measure")
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "total")
CHOSEN = ("strategy", "trainer.devices")  # what is best among those that fit
DEFAULTS = {"hardware": "{name:null,link:null,network:infiniband_ndr}", "topology": "null"}


class Hardware(Closed):
    name: Literal[tuple(DEVICES)] | None  # ty: ignore[invalid-type-form]
    link: Literal[tuple(LINKS)] | None  # ty: ignore[invalid-type-form]
    network: Literal[tuple(LINKS)]  # ty: ignore[invalid-type-form]


class PlanRun(Run):
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
    sys.argv[1:] = words = spelt_out(words)
    config.main(lambda cfg: plan(cfg, words, flags), PlanRun, DEFAULTS, usage=__doc__)


def spelt_out(words: Iterable[str]) -> list[str]:
    """The words, with hardware.name=… for hardware=…."""
    return [f"hardware.name={w[9:]}" if w.startswith("hardware=") else w for w in words]


def measure(cfg: DictConfig) -> None:
    """Starts the ranks that measure, or is one of those that torchrun started."""
    from gptrain import ranks  # here: a plan needs no torch
    from gptrain.plan.measure import measure

    ranks.run(measure, cfg, lambda *_: None)


def plan(cfg: DictConfig, words: list[str], flags: set[str]) -> None:
    """Prints what the flags ask for.   Raises: ConfigError."""
    values = plain(cfg, resolve=True)
    trainer = values["trainer"]
    if "--doctor" in flags:
        n_local, backend = count_devices(trainer["devices"]), values["strategy"]["backend"]
        found = doctor(n_local, trainer["num_nodes"], trainer["accelerator"], backend)
        print(json.dumps(found, indent=1) if "--json" in flags else "\n".join(found))
        return
    machine, topology = find_machine(values)
    found = compare(values, sample_tokens(values["data"]), machine, trainer["num_nodes"])
    if "--trace" in flags or not found["strategies"]:
        found = traced(cfg, values, machine)
        print(json.dumps(found, indent=1) if "--json" in flags else traced_lines(found), flush=True)
        return
    changes = found.pop("changes")
    typed = [word for word in words if not word.startswith(("hardware", "topology"))]
    found["command"] = changes and command_line(typed, changes)
    found["machine"] = {"name": machine.name, "source": machine.source}
    if topology is not None:
        found["topology"] = {
            "islands": topology.islands,
            "slowest_ring_link": topology.slowest_ring_link,
        }
    as_json = "--json" in flags
    print(json.dumps(found, indent=1) if as_json else table(found, changes, topology), flush=True)


def traced(cfg: DictConfig, values: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """The traced step of any net, as `compare` gives estimates.   Raises: ConfigError."""
    from gptrain.plan.trace import trace  # here: it imports torch and Lightning

    precision = {"trainer": {"precision": values["trainer"]["precision"]}}
    cfg = cast(DictConfig, OmegaConf.merge(cfg, precision))
    world_size = machine.n_local * values["trainer"]["num_nodes"]
    found = trace(cfg, world_size, sample_tokens(values["data"]))
    row = found["row"]
    total = row["bytes_per_device"]["total"] * machine.n_local**machine.is_cpu
    row["fits"] = total <= machine.memory_bytes
    return {
        "parameters": found["parameters"],
        "strategies": {found["strategy"]: row},
        "machine": {"name": machine.name, "source": machine.source},
        "traced": True,
        "layers": found["layers"],
    }


def traced_lines(found: dict[str, Any]) -> str:
    """For people: what a device holds, computes and sends."""
    lines = held_lines(found)
    for row in found["strategies"].values():
        sent = ", ".join(
            f"{what} {n_bytes / 2**20:,.1f} MiB" for what, n_bytes in row["wire"].items()
        )
        computed = f"a step    {row['flops'] / 1e12:,.4g} TFLOP of a device, traced"
        lines.append(f"{computed}; sent: {sent or 'nothing'}")
    if found["layers"]:
        few, more, count = found["layers"]
        lines.append(f"layers    of {count}; {few} and {more} were traced, each more adds the same")
    return "\n".join(lines)


def find_machine(values: dict[str, Any]) -> tuple[Machine, Topology | None]:
    """The machine that a config names, or this one, and how it is wired.   Raises: ConfigError."""
    hardware, trainer = values["hardware"], values["trainer"]
    here, device = [], DEVICES.get(hardware["name"])
    if not device and trainer["accelerator"] != "cpu":
        here = nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        device = device_of(here[0]) if here else None
    n_local = count_devices(trainer["devices"]) or len(here)
    if not device:
        try:
            machine = this_machine(Path(values["output_dir"]), n_local or 1)
        except DamagedMeasurement as error:
            output_dir = values["output_dir"]
            raise ConfigError.of("output_dir", output_dir, str(error), code=BAD_DATA) from None
    elif not n_local:
        wrong = "devices of another machine cannot be counted"
        raise ConfigError.of("trainer.devices", "auto", wrong, attempt="trainer.devices=8")
    else:
        link, network = LINKS.get(hardware["link"]), LINKS[hardware["network"]]
        machine = machine_of(device, n_local, link, network)
    source = values["topology"]
    try:
        topology = read_topology(source) if source or here else None
    except ValueError as error:
        raise ConfigError.of("topology", source, str(error)) from error
    except OSError as error:
        wrong = str(error.strerror)
        raise ConfigError.of("topology", source, wrong, code=INPUT_NOT_FOUND) from error
    slowest = topology.slowest_ring_link if topology else None
    if topology and slowest and speed(slowest) < 0:
        island = max(map(len, topology.tensor_groups))
        machine = replace(machine, island=island, host=LINKS["pcie4"])
    if trainer["precision"] == "auto":
        trainer["precision"] = "bf16-mixed" if machine.has_bf16 else "32-true"
    return machine, topology


def table(found: dict[str, Any], changes: dict[str, Any] | None, topology: Topology | None) -> str:
    """For people: what a device holds, and what a step takes."""
    rows, lines = found["strategies"], held_lines(found)
    if all(row["step_s"] is not None for row in rows.values()):
        lines += step_lines(rows)
    if topology and topology.gpus:
        lines.append(f"topology  tensor parallelism inside {topology.tensor_groups}")
        lines[-1] += f", slowest link of a ring {topology.slowest_ring_link}"
    if not changes:
        return "\n".join([*lines, "best      nothing fits: more devices, or a smaller model"])
    needed = [f"{key}={changes[key]}" for key in changes if key not in CHOSEN]
    with_what = f"; nothing fits as typed, but with {' '.join(needed)}" if needed else ""
    lines += [f"best      {found['best']}{with_what}", f"command   {found['command']}"]
    return "\n".join(lines)


def held_lines(found: dict[str, Any]) -> list[str]:
    """What a device holds."""
    machine, rows = found["machine"], found["strategies"]
    held = [row["bytes_per_device"] for row in rows.values()]
    unit, size = unit_of(max(one["total"] for one in held))
    lines = [f"{found['parameters'] / 1e6:,.1f} M parameters, {machine['name']}"]
    lines[0] += f" ({machine['source']})"
    lines.append(f"{f'{unit} of a device':22}{'  '.join(PARTS)}  fits")
    for (name, row), one in zip(rows.items(), held, strict=True):
        numbers = "  ".join(f"{one[part] / size:{len(part)}.2f}" for part in PARTS)
        lines.append(f"{name:22}{numbers}  {'yes' if row['fits'] else 'no'}")
    return lines


def step_lines(rows: dict[str, Any]) -> list[str]:
    """What a step takes."""
    unit, size = unit_of(max(row["wire_bytes_per_step"] for row in rows.values()))
    head = f"seconds   tokens/s    MFU  {unit} sent  hidden s  shown s  scaling"
    priced = any("hours" in row for row in rows.values())
    lines = [f"{'a step':25}{head}{'     hours  device hours' * priced}  most over"]
    for name, row in rows.items():
        hidden_s, wire = row["overlapped_s"], row["wire"]
        line = f"{name:22}{row['step_s']:10.4g} {row['tokens_per_s']:10,.0f} {row['mfu']:6.1%}"
        line += f" {row['wire_bytes_per_step'] / size:9.2f} {hidden_s:9.3g}"
        line += f" {row['communication_s'] - hidden_s:8.3g} {row['scaling_efficiency']:8.1%}"
        if priced:
            line += f"{row['hours']:10,.1f}{row['device_hours']:14,.1f}"
        lines.append(f"{line}  {max(wire, key=wire.get).rpartition(' ')[2] if wire else ''}")
    return lines


if __name__ == "__main__":
    main()
