"""What a run will take before it starts: memory, time and traffic under every strategy.

    python -m gptrain.plan model=gpt2 trainer.devices=8 hardware=h100_sxm
    python -m gptrain.plan model=gpt_7b trainer.devices=8 trainer.num_nodes=8 max_tokens=1e11 \\
        hardware=h100_sxm hardware.link=nvlink4 hardware.network=infiniband_ndr

    hardware         a device of gptrain.plan.hardware; null: this machine
    hardware.link    within a node; null: the device's own
    topology         a file with what `nvidia-smi topo -m` prints, or - for a pipe
    --json           everything, for programs
    --sweep devices=1,2,4,8,64,512
                     what gradient synchronisation takes of a step under ddp; a table and a plot
    --doctor         what is wrong with this machine for such a run, each line with its fix
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gptrain import config
from gptrain.config.compose import plain
from gptrain.config.schema import Closed, Run
from gptrain.launch.process import count_devices
from gptrain.plan import sweep
from gptrain.plan.choice import command_line, compare
from gptrain.plan.doctor import doctor
from gptrain.plan.hardware import device_of, find_device, find_link
from gptrain.plan.speed import Machine, machine_of, this_machine
from gptrain.plan.topology import Topology, nvidia_smi, read_topology, speed
from gptrain.plan.work import find_work
from gptrain.problems import INPUT_NOT_FOUND, ConfigError

FLAGS, GIB = ("--json", "--sweep", "--doctor"), 2**30
DEFAULTS = {"hardware": "{name:null,link:null,network:infiniband_ndr}", "topology": "null"}


class Hardware(Closed):
    name: str | None
    link: str | None
    network: str


class PlanRun(Run):
    """A run's keys and the command's own."""

    runs_here = False
    hardware: Hardware
    topology: str | None


def main() -> None:
    """The command line, in which hardware=… stands for hardware.name."""
    flags, counts = set(FLAGS) & set(sys.argv), ""
    if "--sweep" in flags:
        counts = next((word for word in sys.argv if word.startswith("devices=")), "")
    words = [word for word in sys.argv[1:] if word not in (*FLAGS, counts)]
    words = [f"hardware.name={w[9:]}" if w.startswith("hardware=") else w for w in words]
    sys.argv[1:] = words
    config.main(lambda cfg: plan(cfg, words, flags, counts[8:]), PlanRun, DEFAULTS, usage=__doc__)


def plan(cfg: DictConfig, words: list[str], flags: set[str], counts: str) -> None:
    """Prints what the flags ask for.   Raises: ConfigError."""
    values = plain(cfg, resolve=True)
    if "--doctor" in flags:
        trainer, backend = values["trainer"], values["strategy"]["backend"]
        n_local = count_devices(trainer["devices"])
        found = doctor(n_local, trainer["num_nodes"], trainer["accelerator"], backend)
        print(json.dumps(found, indent=1) if "--json" in flags else "\n".join(found))
        return
    machine, topology = find_machine(values)
    found = compare(values, machine, values["trainer"]["num_nodes"])
    if not found["strategies"]:
        wrong = "its sizes are not known; only those of SimpleGPT and Llama are, on tokens"
        raise ConfigError.of("model._target_", values["model"]["_target_"], wrong)
    if "--sweep" in flags:
        numbers = [int(n) if n.isdigit() else 0 for n in counts.split(",")]
        if 0 in numbers:
            wrong = "not a list of numbers of devices"
            raise ConfigError.of("devices", counts, wrong, attempt="devices=1,2,4,8,64,512")
        work = find_work(values, "ddp", values["strategy"], 1, machine.is_cpu)
        shares = sweep.sweep(work, machine, numbers)
        path = Path(values["output_dir"]) / "gradient-synchronisation.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sweep.plot(numbers, shares))
        print(f"{sweep.table(numbers, shares)}\nplot: {path}")
        return
    changes = found.pop("changes")
    typed = [word for word in words if not word.startswith(("hardware", "topology"))]
    found["command"] = changes and command_line(typed, changes)
    found["machine"] = {"name": machine.name, "source": machine.source}
    if topology is not None:
        found["topology"] = topology.to_json()
    print(json.dumps(found, indent=1) if "--json" in flags else table(found), flush=True)


def find_machine(values: dict[str, Any]) -> tuple[Machine, Topology | None]:
    """The machine that a config names, or this one, and how it is wired.   Raises: ConfigError."""
    hardware, trainer, topology = values["hardware"], values["trainer"], None
    n_local, on_gpu = count_devices(trainer["devices"]), trainer["accelerator"] != "cpu"
    here = []
    if on_gpu and not hardware["name"]:
        here = nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        n_local = n_local or len(here) or 1
    device = hardware["name"] and _find("hardware", hardware["name"], find_device)
    device = device_of(here[0]) if here else device
    if device is None:
        machine = this_machine(Path(values["output_dir"]) / "machine.json", n_local or 1)
    elif n_local is None:
        wrong = "devices of another machine cannot be counted"
        raise ConfigError.of("trainer.devices", "auto", wrong, attempt="trainer.devices=8")
    else:
        link = _find("hardware.link", hardware["link"] or device.link, find_link)
        network = _find("hardware.network", hardware["network"], find_link)
        machine = machine_of(device, n_local, link, network)
    if values["topology"] or here:
        topology = _find("topology", values["topology"], read_topology)
    slowest = topology and topology.slowest_ring_link
    if slowest and speed(slowest) < 0:
        island = max(map(len, topology.tensor_groups))
        machine = replace(machine, island=island, host=find_link("pcie4"))
    if trainer["precision"] == "auto":
        has_bf16 = machine.flops_per_s.get("bfloat16", 0) > machine.flops_per_s["float32"]
        trainer["precision"] = "bf16-mixed" if has_bf16 else "32-true"
    return machine, topology


def _find(key: str, value: str | None, find: Callable[[str | None], Any]) -> Any:
    """What a word stands for.   Raises: ConfigError."""
    try:
        return find(value)
    except ValueError as error:
        raise ConfigError.of(key, value, str(error)) from error
    except OSError as error:
        raise ConfigError.of(key, value, str(error.strerror), code=INPUT_NOT_FOUND) from error


def table(found: dict[str, Any]) -> str:
    """For people: GiB of a device, and what a step takes."""
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "total")
    machine, rows = found["machine"], found["strategies"].items()
    lines = [f"{found['parameters'] / 1e6:,.1f} M parameters, {machine['name']}"]
    lines[0] += f" ({machine['source']})"
    lines.append(f"{'GiB of a device':22}{'  '.join(parts)}  fits")
    for name, row in rows:
        held = (f"{row['bytes_per_device'][part] / GIB:{len(part)}.2f}" for part in parts)
        lines.append(f"{name:22}{'  '.join(held)}  {'yes' if row['fits'] else 'no'}")
    lines.append(f"{'a step':22}   seconds   tokens/s    MFU  GiB sent  hidden s  shown s  scaling")
    for name, row in rows:
        hidden_s, sent = row["overlapped_s"], row["wire_bytes_per_step"] / GIB
        lines.append(
            f"{name:22}{row['step_s']:10.4g} {row['tokens_per_s']:10,.0f} {row['mfu']:6.1%}"
            f" {sent:9.3f} {hidden_s:9.3g} {row['communication_s'] - hidden_s:8.3g}"
            f" {row['scaling_efficiency']:8.1%}"
        )
        if "hours" in row:
            lines[-1] += f"  {row['hours']:,.1f} h, {row['device_hours']:,.1f} device hours"
    if "topology" in found:
        lines.append(f"topology  {json.dumps(found['topology'])}")
    lines.append(f"best      {found['best'] or 'nothing fits: more devices, or a smaller model'}")
    return "\n".join(lines + [f"command   {found['command']}"] * bool(found["command"]))
