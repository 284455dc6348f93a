"""What a run will take, before it starts: memory, time and traffic under every strategy.

python -m gptrain.plan model=gpt2 trainer.devices=8 hardware=h100_sxm
python -m gptrain.plan model=gpt_7b trainer.devices=8 trainer.num_nodes=8 hardware=a100_sxm_80gb

hardware          a device of gptrain.plan.hardware; null: this machine
hardware.link     within a node; null: the device's own
hardware.network  between nodes
topology          a file with what `nvidia-smi topo -m` prints, or - for a pipe
--json            everything, for programs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gptrain import config
from gptrain.config.compose import plain
from gptrain.config.schema import Closed, Run
from gptrain.launch.process import count_devices
from gptrain.plan.choice import command_line, compare
from gptrain.plan.hardware import find_device, find_link
from gptrain.plan.speed import Machine, machine_of, this_machine
from gptrain.problems import ConfigError

GIB = 2**30


class Hardware(Closed):
    name: str | None
    link: str | None
    network: str


class PlanRun(Run):
    """A run's keys and the command's own."""

    runs_here = False
    hardware: Hardware
    topology: str | None


DEFAULTS = {"hardware": "{name:null,link:null,network:infiniband_ndr}", "topology": "null"}


def main() -> None:
    """The command line, in which hardware=… stands for hardware.name."""
    flags = {word for word in sys.argv[1:] if word == "--json"}
    words = [word for word in sys.argv[1:] if word not in flags]
    words = [f"hardware.name={w[9:]}" if w.startswith("hardware=") else w for w in words]
    sys.argv[1:] = words
    config.main(lambda cfg: plan(cfg, words, "--json" in flags), PlanRun, DEFAULTS, usage=__doc__)


def plan(cfg: DictConfig, words: list[str], as_json: bool) -> None:
    """Prints the plan of a config."""
    values = plain(cfg, resolve=True)
    machine, n_nodes = find_machine(values), values["trainer"]["num_nodes"]
    found = compare(values, machine, n_nodes)
    if not found["strategies"]:
        wrong = "has no sizes that the planner knows; only SimpleGPT and Llama have"
        raise ConfigError.of("model._target_", values["model"]["_target_"], wrong)
    own = ("hardware", "topology")
    typed = [word for word in words if not word.startswith(own)]
    found["command"] = command_line(typed, found["command"])
    found["machine"] = {"name": machine.name, "source": machine.source}
    print(json.dumps(found, indent=1) if as_json else table(found, machine), flush=True)


def find_machine(values: dict[str, Any]) -> Machine:
    """The machine that a config names, or this one.   Raises: ConfigError."""
    hardware, n_local = values["hardware"], count_devices(values["trainer"]["devices"])
    if hardware["name"] is None:
        return this_machine(Path(values["output_dir"]) / "machine.json", n_local or 1)
    try:
        key, device = "hardware", find_device(hardware["name"])
        key, link = "hardware.link", find_link(hardware["link"] or device.link)
        key, network = "hardware.network", find_link(hardware["network"])
    except ValueError as error:
        raise ConfigError.of(key, None, str(error)) from error
    if n_local is None:
        wrong = "devices of another machine cannot be counted"
        raise ConfigError.of("trainer.devices", "auto", wrong, attempt="trainer.devices=8")
    return machine_of(device, n_local, link, network)


def table(found: dict[str, Any], machine: Machine) -> str:
    """For people."""
    lines = []
    for name, row in found["strategies"].items():
        parts = " ".join(f"{n_bytes / GIB:8.2f}" for n_bytes in row["bytes_per_device"].values())
        lines.append(f"{name:21}{parts} {row['step_s'] * 1e3:9.4g} ms {row['tokens_per_s']:12,.0f}")
    return "\n".join(lines)
