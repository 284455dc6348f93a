"""Compare the planner's bytes, FLOPs, traffic and times with real runs on this machine's CPU.

python -m gptrain.plan --measure           measure the machine first, for the time of a step
python -m tests.plan_accuracy              all configs, a table of predicted and measured values
python -m tests.plan_accuracy gpt_nano ddp configs whose name contains one of these words

Each config is run once with a Meter. It measures memory, FLOPs and traffic in one step each, and
then times the other steps. All configs take four minutes on a machine without other load.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from gptrain.costs.choice import compare
from gptrain.costs.machine import this_machine
from gptrain.plan.counters import FLOPS, Sent

ROOT = Path(__file__).parents[1]
NANO = ("model=gpt_nano", "data.seq_len=129", "data.batch_size=8")
HALF, FULL = "trainer.precision=bf16-mixed", "model.activation_checkpointing=full"
FSDP = "trainer.devices=2 strategy=fsdp"
CONFIGS = {  # name -> overrides in addition to NANO
    "gpt_nano": "",
    "gpt_nano dropout": "model.dropout=0.1",
    "gpt_nano accumulate": "trainer.accumulate_grad_batches=4",
    "gpt_nano full": FULL,
    "gpt_nano selective": "model.activation_checkpointing=selective",
    "gpt_nano bf16": HALF,
    "gpt_nano sgd": "~optimizer.betas ~optimizer.eps ~optimizer.fused "
    "optimizer._target_=torch.optim.SGD",
    "gpt_nano muon": "optimizer=muon",
    "wide vocabulary": "model.vocab_size=20000 model.n_layers=2 data.batch_size=4",
    "long": "model.max_seq_len=1024 data.seq_len=1025 data.batch_size=1",
    "larger": "model.d_model=384 model.n_heads=6 model.n_layers=6 data.seq_len=128 "
    "data.batch_size=4",
    "llama_nano": "model=llama_nano",
    "llama_nano full": f"model=llama_nano {FULL}",
    "ddp": "trainer.devices=2",
    "ddp bf16 hook": "trainer.devices=2 strategy=ddp strategy.comm_hook=bf16",
    "ddp muon": "trainer.devices=2 optimizer=muon",
    "fsdp": FSDP,
    "fsdp muon": f"{FSDP} optimizer=muon",
    "fsdp bf16": f"{FSDP} {HALF}",
    "fsdp bf16 full": f"{FSDP} {HALF} {FULL}",
    "fsdp bf16 llama": f"model=llama_nano {FSDP} {HALF}",
    "fsdp kept": f"{FSDP} strategy.reshard_after_forward=false",
    "tensor_parallel": "trainer.devices=2 strategy=tensor_parallel",
    "pipeline": "trainer.devices=2 strategy=pipeline",
}
QUIET = ["checkpoint=none", "logger=none", "callbacks=none", "trainer.enable_progress_bar=false"]
QUIET += ["trainer.limit_val_batches=0", "trainer.accelerator=cpu"]


class Meter(pl.Callback):
    """Writes a rank's memory in step 3, its FLOPs in step 4 and its traffic in step 5 into a file.

    The file also has the median time of the steps after the sixth. The memory is that of tensors:
    parameters, gradients and optimizer states before the step, and the peak within the step.
    """

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self.ended_s: list[float] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        step, first = divmod(batch_idx, trainer.accumulate_grad_batches)
        if first != 0 or step not in (2, 3, 4):
            return
        if step == 2:
            gc.collect()  # garbage of an earlier run must not be freed within the step
            self.found |= held_bytes(module, trainer.optimizers[0])
        self.mode = (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True),
            FlopCounterMode(display=False, custom_mapping=FLOPS),
            Sent(),
        )[step - 2]
        self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        step, last = divmod(batch_idx + 1, trainer.accumulate_grad_batches)
        if last == 0 and step > 6:
            self.ended_s.append(time.perf_counter())
        if last != 0 or step not in (3, 4, 5):
            return
        self.mode.__exit__(None, None, None)
        if step == 3:
            self.found["peak"] = self.found["alive"] + highest(self.mode)
        elif step == 4:
            self.found["flops"] = self.mode.get_total_flops()
        else:
            self.found["wire"] = self.mode.total

    def on_train_end(self, trainer, module):
        if len(self.ended_s) > 1:
            self.found["step_s"] = median(b - a for a, b in pairwise(self.ended_s))
        folder = Path(trainer.default_root_dir)
        (folder / f"meter-{trainer.global_rank}.json").write_text(json.dumps(self.found))


def held_bytes(module: Any, optimizer: Any) -> dict[str, float]:
    """Return the bytes of this rank's parameters, gradients and states, and of their storages."""

    def local(tensor: Any) -> Any:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    weights = [local(p.data) for p in module.net.parameters()]
    gradients = [local(p.grad) for p in module.net.parameters() if p.grad is not None]
    states = [local(t) for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    states = [tensor for tensor in states if tensor.numel() > 1]
    # The profiler does not see that gradients are freed at the start of a step. DDP's buckets stay.
    stay = gradients if isinstance(module.trainer.strategy, DDPStrategy) else []
    stay = stay if any(g._base is not None for g in gradients) else []
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*weights, *stay, *states)
    }
    parts = {"weights": weights, "gradients": gradients, "optimizer": states}
    sums = {name: sum(t.nbytes for t in tensors) for name, tensors in parts.items()}
    return sums | {"alive": sum(storages.values())}


def highest(profiled: profile) -> float:
    """Return the peak of the bytes that were allocated in the profiled step.

    Memory that was allocated before the step and freed within it is not counted.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    memory_events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    allocated, most = {}, 0  # address -> bytes
    for event in memory_events:
        address, n_bytes = event["args"]["Addr"], event["args"]["Bytes"]
        if n_bytes > 0:
            allocated[address] = n_bytes
        else:
            allocated.pop(address, None)
        most = max(most, sum(allocated.values()))
    return most


METERED = ("trainer.max_steps=6", "+callbacks.meter={_target_: tests.plan_accuracy.Meter}")
N_STEPS = 36  # includes the metered steps


def measure(words: list[str], folder: Path) -> dict[str, Any]:
    """Run train.py with these words, and return its memory, FLOPs, traffic and step time."""
    more = (METERED[1], f"trainer.max_steps={N_STEPS}", "trainer.log_every_n_steps=100")
    command = [sys.executable, "train.py", *words, *QUIET, *more, f"run_dir={folder / 'run'}"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return read_meters(folder / "run")


def read_meters(folder: Path) -> dict[str, float]:
    """Return the largest value of all ranks for each quantity, and the mean FLOPs of a rank."""
    ranks = [json.loads(file.read_text()) for file in folder.glob("meter-*.json")]
    largest = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return largest | {"flops": sum(rank["flops"] for rank in ranks) / len(ranks)}


def predict(words: list[str]) -> dict[str, Any]:
    """The planner's estimate of the strategy that these words run."""
    from gptrain.core.strategies import strategy_name
    from tests.command_line import compose_run

    run = compose_run(*words, *QUIET)
    n_ranks = run.trainer.devices
    machine = this_machine(Path(run.output_dir), n_ranks)
    name = strategy_name(run.strategy.name, n_ranks)
    return compare(run, run.data.sample_tokens, machine, 1)["strategies"][name]


def compare_all(plan: dict[str, Any], real: dict[str, Any]) -> dict[str, float]:
    """Predicted over measured: states, peak, FLOPs, wire, and the time where it was measured."""
    held, states = plan["bytes_per_device"], ("weights", "gradients", "optimizer")
    return {
        "states": sum(held[key] for key in states) / sum(real[key] for key in states),
        "peak": held["total"] / real["peak"],
        "flops": sum(plan[key] for key in plan if key.endswith("flops")) / real["flops"],
        "wire": plan["wire_bytes_per_step"] / real["wire"] if real["wire"] else 1.0,
        "time": (plan["step_s"] or nan) / real.get("step_s", nan),
    }


def main(wanted: list[str]) -> None:
    """Prints the table."""
    print(f"{'predicted/measured':21}  states    peak   flops    wire    time", flush=True)
    for name, line in CONFIGS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        words = [*NANO, *line.split()]
        with tempfile.TemporaryDirectory() as folder:
            real = measure(words, Path(folder))
        ratios = compare_all(predict(words), real).values()
        shown = " ".join(f"{ratio:7.3f}" for ratio in ratios)
        print(f"{name:21} {shown}   {real.get('step_s', 0) * 1e3:8.2f} ms"
              f" {real['peak'] / 2**20:8.1f} MiB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
