r"""Print the memory, time and traffic of a run under every strategy, before it starts.

    python -m gptrain.plan model=gpt2 trainer.devices=8 hardware=h100_sxm
    python -m gptrain.plan model=gpt_7b trainer.devices=8 trainer.num_nodes=8 max_tokens=1e11 \
        hardware=h100_sxm hardware.link=nvlink4 hardware.network=infiniband_ndr

The command takes the overrides of train.py, and these keys and flags:

    hardware         a device of gptrain.costs.hardware; null: this machine
    hardware.link    link between the GPUs of a node; null: the device's own
    hardware.network link between nodes, of each GPU
    topology         a file with the output of `nvidia-smi topo -m`, or /dev/stdin
    --json           print all results as JSON
    --doctor         check this machine for faults that such a run would meet, and print fixes

A net of your own has no formulas: its weights, gradients and optimizer states are exact, and what
else a step needs is not known before it runs.
"""

import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gptrain import config
from gptrain.core import shell
from gptrain.core.errors import BAD_CONFIG, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import Section
from gptrain.costs.choice import compare
from gptrain.costs.hardware import DEVICES, LINKS, Machine, device_of, machine_of, this_cpu
from gptrain.costs.topology import find_islands, parse_topology, slowest_ring_link, speed
from gptrain.plan.doctor import doctor
from gptrain.runs.table import align_columns, format_cell
from gptrain.runtime.process import count_devices

_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "total")
# Columns of the two tables: titles and keys of a row. A row includes `bytes_per_device`.
_MEMORY = {part: part for part in _PARTS} | {"fits": "fits", "largest batch": "largest_batch_size"}
_STEP = {"GiB sent": "wire_bytes_per_step", "traffic s": "communication_s", "seconds": "step_s",
        "tokens/s": "tokens_per_s", "MFU": "mfu", "scaling": "scaling_efficiency",
        "hours": "hours"}  # fmt: skip


class _Hardware(Section):
    """Options of the group `hardware`. None stands for this machine, or the device's own link."""

    name: Literal[tuple(DEVICES)] | None = None  # ty: ignore[invalid-type-form]
    link: Literal[tuple(LINKS)] | None = None  # ty: ignore[invalid-type-form]
    network: Literal[tuple(LINKS)] = "infiniband_ndr"  # ty: ignore[invalid-type-form]


class PlanRun(RunConfig):
    """Keys of the command `gptrain.plan`: those of a run, `hardware`, and the file `topology`."""

    hardware: _Hardware = _Hardware()
    topology: str | None = None


def find_machine(cfg: PlanRun) -> tuple[Machine, dict[str, Any]]:
    """Return the machine that `hardware.name` names, or this one, and facts about its links.

    This machine is its GPUs if the table in `gptrain.costs.hardware` has them and
    `trainer.accelerator` is not "cpu", else its CPU.

    Returns:
        The machine, and {"topology": {"islands", "slowest_ring_link"}}, from the functions of
        `gptrain.costs.topology`. {} if the links are not known.

    Raises:
        ConfigError: If the topology cannot be read, or if `trainer.devices` of another machine is
            "auto".
    """
    hardware, source = cfg.hardware, cfg.topology
    name, gpus, text = hardware.name, [], ""
    if not name and cfg.trainer.accelerator != "cpu":
        gpus = _nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines()
        text = _nvidia_smi("topo", "-m")
        name = device_of(gpus[0]) if gpus else None
    n_local = count_devices(cfg.trainer.devices) or len(gpus)
    if not name:
        return this_cpu(n_local or 1), {}
    if not n_local:
        message = "devices of another machine cannot be counted"
        raise ConfigError.of("trainer.devices", "auto", message, hint="trainer.devices=8")
    machine = machine_of(name, n_local, hardware.link, hardware.network)
    try:
        text = Path(source).read_text() if source else text
        links = parse_topology(text) if source or text else {}
    except (OSError, ValueError) as error:
        code = INPUT_NOT_FOUND if isinstance(error, OSError) else BAD_CONFIG
        raise ConfigError.of("topology", source, str(error), code=code) from error
    islands, slowest = find_islands(links), slowest_ring_link(links)
    if slowest and speed(slowest) < 0:
        # Only some GPUs have NVLinks to each other. Rings through more GPUs use PCIe.
        machine = replace(machine, island=max(map(len, islands)), host=LINKS["pcie4"])
    topology = {"islands": islands, "slowest_ring_link": slowest}
    return machine, {"topology": topology} if links else {}


def _nvidia_smi(*arguments: str) -> str:
    """Run nvidia-smi and return its output, or "" if it is missing or fails."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(["nvidia-smi", *arguments], text=True)
    return ""


def main() -> None:
    """Run the command `python -m gptrain.plan` with the words in `sys.argv`, and exit.

    `hardware=…` stands for `hardware.name=…`.
    """
    flags = {"--json", "--doctor"} & set(sys.argv)
    words = [re.sub("^hardware=", "hardware.name=", word) for word in sys.argv[1:]]
    sys.argv[1:] = words = [word for word in words if word not in flags]
    config.main(lambda cfg: _plan(cfg, words, flags), PlanRun, usage=__doc__)


def _plan(cfg: PlanRun, words: list[str], flags: set[str]) -> None:
    """Print the plan of a run, or with the flag `--doctor` the faults of this machine."""
    trainer = cfg.trainer
    if "--doctor" in flags:
        return print(*doctor(count_devices(trainer.devices), trainer.accelerator), sep="\n")
    machine, topology = find_machine(cfg)
    n_nodes = 1 if trainer.num_nodes == "auto" else trainer.num_nodes
    if trainer.precision == "auto":
        is_native = "bfloat16" in machine.flops_per_s
        cfg = cfg.changed({"trainer.precision": "bf16-mixed" if is_native else "32-true"})
    result = compare(cfg, cfg.data.sample_tokens, machine, n_nodes)
    if not result["strategies"]:
        from gptrain.plan.own_net import plan_own_net  # imported late: needs torch

        result = plan_own_net(cfg, machine, n_nodes)
    for row in result["strategies"].values():
        if cfg.max_tokens and row.get("tokens_per_s"):
            row["hours"] = cfg.max_tokens / row["tokens_per_s"] / 3600
    result["command"] = result["changes"] and _train_command(words, result["changes"])
    facts = {"name": machine.name, "source": machine.source}
    result |= {"machine": facts | {"memory_bytes": round(machine.memory_bytes)}} | topology
    print(json.dumps(result, indent=1) if "--json" in flags else "\n".join(plan_lines(result)))


def _train_command(typed: list[str], changes: dict[str, Any]) -> str:
    """Return the command that trains with the typed overrides and with changed keys."""
    # Options of the strategy, `strategy.<key>=...`, may belong to another one. They are kept only
    # if the user also typed `strategy=` with the new strategy.
    options = () if f"strategy={changes['strategy']}" in typed else ("strategy.",)
    dropped = ("hardware", "topology", *options, *(f"{key}=" for key in changes))
    kept = (word for word in typed if not word.lstrip("+").startswith(dropped))
    return shell.train_command(*kept, *(f"{key}={value}" for key, value in changes.items()))


def plan_lines(result: dict[str, Any]) -> list[str]:
    """Return the printed lines of a plan: memory and time of each strategy, and the best.

    `result` has the keys of `--json`, which the README of this package lists.
    """
    machine, rows = result["machine"], result["strategies"]
    head = f"{result['parameters'] / 1e6:,.1f} M parameters, {machine['name']}"
    lines = [f"{head} ({machine['source']}; {machine['memory_bytes'] / 2**30:.1f} GiB for tensors)"]
    for title, columns in ("GiB of a device", _MEMORY), ("a step", _STEP):
        table = [[title, *columns]]
        for name, row in rows.items():
            row = row | row["bytes_per_device"]
            row |= {k: row[k] / 2**30 for k in (*_PARTS, "wire_bytes_per_step") if k in row}
            row["fits"] = {True: "yes", False: "no", None: "not known"}[row["fits"]]
            table.append([name, *map(format_cell, map(row.get, columns.values()))])
        lines.append(align_columns(table))
    lines += [f"topology  {key} {value}" for key, value in result.get("topology", {}).items()]
    none = "none is known to fit; try: more devices, a smaller model, or trainer.fast_dev_run=true"
    return [*lines, f"best      {result['command'] or none}"]


if __name__ == "__main__":
    main()
