r"""Print the memory, time and traffic of a run under every strategy, before it starts.

    python -m gptrain.plan model=gpt2 trainer.devices=8 hardware=h100_sxm
    python -m gptrain.plan model=gpt_7b trainer.devices=8 trainer.num_nodes=8 max_tokens=1e11 \
        hardware=h100_sxm hardware.link=nvlink4 hardware.network=infiniband_ndr

The command takes the overrides of train.py, and these keys and flags:

    hardware         a device of gptrain.costs.hardware; null: this machine
    hardware.link    link between the GPUs of a node; null: the device's own
    hardware.network link between nodes, of each GPU
    topology         a file with the output of `nvidia-smi topo -m`, or - for standard input
    --json           print all results as JSON
    --doctor         check this machine for faults that such a run would meet, and print fixes
    --trace          trace a step of the real code under the config's strategy, on tensors without
                     data, in place of the formulas; nets without formulas, such as your own, are
                     always traced
    --measure        measure the collectives between trainer.devices (2) ranks on this machine, up
                     to max_bytes (16 MiB), and the speed of the CPU; the result is written to
                     machine.json in output_dir, where later plans for this machine read it; also
                     works under torchrun
"""

import json
import sys
from functools import partial
from typing import Any

from gptrain import config
from gptrain.collectives.command import DEFAULTS as OPTIONS
from gptrain.collectives.command import CollectivesRun, default_devices
from gptrain.core import shell
from gptrain.costs.choice import changed_overrides, compare
from gptrain.costs.machine import Machine
from gptrain.costs.speed import unit_of
from gptrain.costs.topology import Topology
from gptrain.plan.doctor import doctor
from gptrain.plan.options import DEFAULTS, PlanRun, expand_hardware, find_machine, resolve_precision
from gptrain.runs.table import align_columns
from gptrain.runtime.process import count_devices, count_nodes

FLAGS = ("--json", "--doctor", "--trace", "--measure")
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "total")
# Keys by which the best strategy is selected.
CHOSEN = ("strategy", "trainer.devices", "trainer.num_nodes")


def main() -> None:
    """Run the command `python -m gptrain.plan` with the words in `sys.argv`, and exit.

    `hardware=…` stands for `hardware.name=…`.
    """
    flags = set(FLAGS) & set(sys.argv)
    words = [word for word in sys.argv[1:] if word not in FLAGS]
    if "--measure" in flags:
        sys.argv[1:] = ["name=measure", default_devices(), *words]
        config.main(measure, CollectivesRun, OPTIONS, usage=__doc__)
    sys.argv[1:] = words = expand_hardware(words)
    config.main(lambda cfg: plan(cfg, words, flags), PlanRun, DEFAULTS, usage=__doc__)


def measure(cfg: CollectivesRun) -> None:
    """Measure the collectives between the ranks and the CPU of this machine, for `--measure`.

    Starts the ranks, or runs as one of the ranks that torchrun started. Rank 0 prints the times of
    the collectives, and writes the speeds of the CPU and of the link between the ranks to
    machine.json in `cfg.output_dir`, where later plans read them.

    Args:
        cfg: Configuration of the command.

    Raises:
        JobFailedError: If a rank fails, after its error was printed. In a rank of torchrun the
            process ends instead.
        ConfigError: If another run holds the folder of the command.
    """
    # Imported late: a plan does not need torch.
    from gptrain import runtime
    from gptrain.plan.measure import measure

    runtime.run(measure, cfg, lambda *_: None)


def plan(cfg: PlanRun, words: list[str], flags: set[str]) -> None:
    """Print the plan, the traced step or the faults of the machine.

    --doctor prints the faults of this machine. The step is traced with --trace, and if the planner
    has no estimate for the net. --json prints the result as JSON.

    Args:
        cfg: Configuration of the run and of its hardware.
        words: Overrides that the user typed, for the printed command.
        flags: Flags that the user typed: some of --json, --doctor and --trace.

    Raises:
        ConfigError: If a value does not fit.
    """
    trainer = cfg.trainer
    as_json = "--json" in flags
    if "--doctor" in flags:
        n_local, backend = count_devices(trainer.devices), cfg.strategy.backend
        lines = doctor(n_local, count_nodes(trainer.num_nodes), trainer.accelerator, backend)
        print(json.dumps(lines, indent=1) if as_json else "\n".join(lines))
        return
    machine, topology = find_machine(cfg)
    cfg = resolve_precision(cfg, machine)
    result = compare(cfg, cfg.data.sample_tokens, machine, count_nodes(trainer.num_nodes))
    if "--trace" in flags or not result["strategies"]:
        result, lines_of = traced(cfg, machine), traced_lines
    else:
        typed = [word for word in words if not word.startswith(("hardware", "topology"))]
        changes = result["changes"]
        result["command"] = changes and shell.train_command(*changed_overrides(typed, changes))
        if topology:
            islands, slowest = topology.islands, topology.slowest_ring_link
            result["topology"] = {"islands": islands, "slowest_ring_link": slowest}
        lines_of = partial(planned_lines, topology)
    result["machine"] = {"name": machine.name, "source": machine.source}
    print(json.dumps(result, indent=1) if as_json else "\n".join(lines_of(result)))


def traced(cfg: PlanRun, machine: Machine) -> dict[str, Any]:
    """Trace a training step under the config's strategy, and compare its memory with the machine's.

    Args:
        cfg: Configuration of the run.
        machine: Machine of the run.

    Returns:
        The result of `plan.trace.trace`, with the entry `fits` in the row of the strategy, and
        `traced`: True.

    Raises:
        ConfigError: If the step cannot be traced.
    """
    from gptrain.plan.trace import trace  # imported late: needs torch and Lightning

    world_size = machine.n_local * count_nodes(cfg.trainer.num_nodes)
    result = trace(cfg, world_size, cfg.data.sample_tokens)
    for row in result["strategies"].values():
        row["fits"] = machine.has_memory_for(row["bytes_per_device"]["total"])
    return result | {"traced": True}


def planned_lines(topology: Topology | None, result: dict[str, Any]) -> list[str]:
    """Return the printed lines of a plan: memory and time of each strategy, and the best strategy.

    Args:
        topology: Links between the GPUs of a node, or None.
        result: Content of the plan: what `--json` prints.
    """
    rows, changes = result["strategies"], result["changes"]
    lines = memory_lines(result)
    if all(row["step_s"] is not None for row in rows.values()):
        lines.append(step_table(rows))
    if topology and topology.gpus:
        line = f"topology  tensor parallelism inside {topology.tensor_groups}"
        lines.append(f"{line}, slowest link of a ring {topology.slowest_ring_link}")
    if not changes:
        return [*lines, "best      nothing fits: more devices, or a smaller model"]
    needed = [f"{key}={changes[key]}" for key in changes if key not in CHOSEN]
    with_what = f"; nothing fits as typed, but with {' '.join(needed)}" if needed else ""
    return [*lines, f"best      {result['best']}{with_what}", f"command   {result['command']}"]


def traced_lines(result: dict[str, Any]) -> list[str]:
    """Return the printed lines of a trace: memory, FLOPs and traffic of a device.

    Args:
        result: Content of the trace: what `--json` prints.
    """
    (row,) = result["strategies"].values()
    sent = (f"{what} {n_bytes / 2**20:,.1f} MiB" for what, n_bytes in row["wire"].items())
    line = f"a step    {row['flops'] / 1e12:,.4g} TFLOP of a device, traced"
    lines = [*memory_lines(result), f"{line}; sent: {', '.join(sent) or 'nothing'}"]
    if result["layers"]:
        few, more, count = result["layers"]
        how = f"{few} and {more} were traced, the rest is extrapolated"
        lines.append(f"layers    of {count}; {how}")
    return lines


def memory_lines(result: dict[str, Any]) -> list[str]:
    """Return a line about net and machine, and the printed table of the memory of a device.

    Args:
        result: Content of the plan or of the trace: what `--json` prints.
    """
    machine, rows = result["machine"], result["strategies"]
    unit, size = unit_of(max(row["bytes_per_device"]["total"] for row in rows.values()))
    cells = [[f"{unit} of a device", *PARTS, "fits"]]
    for name, row in rows.items():
        held = (f"{row['bytes_per_device'][part] / size:.2f}" for part in PARTS)
        cells.append([name, *held, "yes" if row["fits"] else "no"])
    head = f"{result['parameters'] / 1e6:,.1f} M parameters, {machine['name']}"
    return [f"{head} ({machine['source']})", align_columns(cells)]


def step_table(rows: dict[str, Any]) -> str:
    """Return the printed table of the time and the traffic of a step under each strategy.

    Args:
        rows: Estimate of each strategy, by the strategy's name.
    """
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
    return align_columns(cells)


if __name__ == "__main__":
    main()
