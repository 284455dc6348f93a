"""The planner's figures for five runs, with all that it knows about devices and links.

    python -m tests.plan_figures > tests/plan_figures.json

tests/test_plan.py compares the planner with this file. Where a figure changes on purpose, write the
file again, and read its diff.
"""

import json
from dataclasses import asdict, replace
from typing import Any

from gptrain.costs.choice import compare
from gptrain.costs.hardware import DEVICES, LINKS
from gptrain.costs.machine import Machine, machine_of
from tests.command_line import compose_run

# The tests of the planner work out single figures by hand. These runs are compared as a whole.
MACHINES = {
    "h100": machine_of(DEVICES["h100_sxm"], 8),
    "a100 in pairs": replace(
        machine_of(DEVICES["a100_pcie_80gb"], 4, LINKS["nvlink3"], LINKS["ethernet_100"]),
        island=2,
        host=LINKS["pcie4"],
    ),
    "v100": machine_of(DEVICES["v100_sxm2"], 8, network=LINKS["infiniband_hdr"]),
    "cpu": Machine(
        "4 cores", 2, 2**35, {"float32": 2e11, "bfloat16": 3e11}, 2e10, 4e-6,
        replace(LINKS["ethernet_10"], wait_s=2e-3), LINKS["ethernet_10"], "", is_cpu=True,
    ),
}  # fmt: skip
# Name of the machine, number of nodes, tokens per sample, overrides of the run.
RUNS = (
    ("h100", 2, 4096, ["model=llama_8b", "optimizer=muon", "trainer.precision=bf16-mixed",
                       "trainer.accumulate_grad_batches=3", "max_tokens=1e10",
                       "model.activation_checkpointing=full", "strategy=fsdp",
                       "strategy.replicas=2", "strategy.accumulate_shards=true",
                       "strategy.reshard_after_forward=false"]),
    ("a100 in pairs", 1, 2048, ["model=gpt2_xl", "trainer.precision=bf16-true",
                                "model.activation_checkpointing=selective", "data.batch_size=4",
                                "model.compile=blocks", "model.dropout=0.1", "strategy=ddp",
                                "strategy.comm_hook=bf16", "strategy.bucket_cap_mb=50"]),
    ("v100", 3, 512, ["model=llama_124m", "trainer.precision=32-true", "data.batch_size=4",
                      "strategy=ddp", "strategy.comm_hook=bf16"]),
    ("cpu", 2, 256, ["model=simple_gpt", "trainer.precision=bf16-mixed", "data.batch_size=8",
                     "strategy=context_parallel"]),
    ("cpu", 1, 256, ["model=simple_gpt", "optimizer=muon", "data.batch_size=8",
                     "strategy=pipeline", "strategy.microbatches=4"]),
)  # fmt: skip


def figures() -> dict[str, Any]:
    """Return the figures of each device, link and strategy as plain values, in six digits."""
    rows: dict[str, Any] = {
        f"device {name}": asdict(device) | {"efficiency": device.efficiency}
        for name, device in DEVICES.items()
    }
    rows |= {f"link {name}": asdict(link) for name, link in LINKS.items()}
    for name, n_nodes, sample_tokens, words in RUNS:
        run = f"{n_nodes} x {name}: {' '.join(words)}"
        machine = MACHINES[name]
        devices = (f"trainer.devices={machine.n_local}", f"trainer.num_nodes={n_nodes}")
        plan = compare(compose_run(*words, *devices), sample_tokens, machine, n_nodes)
        rows |= {f"{run}: {key}": row for key, row in plan.pop("strategies").items()}
        rows[run] = plan
    return json.loads(json.dumps(rows), parse_float=lambda text: float(f"{float(text):.6g}"))


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in figures().items())
    print("{" + ",\n".join(lines) + "}")
