"""Whether this machine has what the config asks for: accelerator, devices, memory. Needs torch."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from gptrain.config.checks.place import PROCESSES_PER_CORE, count_cores
from gptrain.config.checks.run import Run
from gptrain.config.checks.strategies import count_devices, refuse_on_cpu
from gptrain.config.checks.world import check_world, plan_dims
from gptrain.launch.devices import accelerator_of, count_local
from gptrain.launch.process import this_process
from gptrain.plan import ParallelDims
from gptrain.plan.memory import bytes_per_parameter, rank_parameters
from gptrain.plan.shape import GPTShape

GIB = 2**30
SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")


def check_machine(run: Run) -> None:
    """Accelerator, devices and memory; starts no CUDA context."""
    asked = run.get("trainer.accelerator")
    kind = accelerator_of(asked)
    if kind is None:
        run.error(
            "trainer.accelerator", f"no {_name(asked)} on this machine", attempt="trainer=cpu"
        )
        return
    if kind == "cpu" and asked != "cpu":
        refuse_on_cpu(run)
        if run.get("strategy.backend") == "nccl":
            run.error("strategy.backend", "nccl needs GPUs", attempt="strategy.backend=gloo")
    if run.get("strategy.backend") == "mpi" and not torch.distributed.is_mpi_available():
        run.error(
            "strategy.backend",
            "this torch is built without MPI",
            attempt="strategy.backend=null: nccl on GPU, gloo on CPU",
        )
    n_local = count_local(run.get("trainer.devices"), kind, run.get("trainer.num_nodes", 1))
    if kind == "cuda":
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        check_visible(run, torch.cuda.device_count(), shown, this_process().is_rank)
    elif kind == "mps" and n_local > 1:
        run.error("trainer.devices", "an Apple machine has one GPU", attempt="trainer.devices=1")
    else:
        _check_cores(run, n_local)
    if run.failed:
        return
    process = this_process()
    run.world_size = (
        process.world_size if process.is_rank else n_local * run.get("trainer.num_nodes")
    )
    if run.get("strategy.name") == "single" and run.world_size > 1:
        run.error(
            "trainer.devices", "more than one device under strategy=single", attempt="strategy=ddp"
        )
        return
    if count_devices(run.get("trainer.devices")) is None and not process.is_rank:
        check_world(run, run.world_size)
    split = plan_dims(run, run.world_size)
    if split:
        _check_memory(run, split, n_local, kind)
    if n_local == 1 and not process.is_rank and run.get("launcher.max_restarts"):
        run.warn("launcher.max_restarts", "no effect on one device, which has no supervisor")


def _name(accelerator: str) -> str:
    return {"gpu": "GPU", "cuda": "GPU", "mps": "Apple GPU"}.get(accelerator, accelerator.upper())


def check_visible(run: Run, visible: int, shown: str | None, is_rank: bool = False) -> None:
    """As many GPUs as asked for, and of the numbers asked for.

    Args:
        visible: GPUs that this process sees.   shown: CUDA_VISIBLE_DEVICES.
        is_rank: a launcher started it, and may show each rank one GPU, its own, as number 0.
    """
    if is_rank and visible == 1:
        return
    asked = run.get("trainer.devices")
    where = f" (CUDA_VISIBLE_DEVICES={shown})" if shown is not None else ""
    only = f"only {visible} GPU{'s' if visible != 1 else ''} visible{where}"
    if isinstance(asked, str) and "," in asked:
        asked = [int(part) for part in asked.split(",") if part]
    if isinstance(asked, list):
        if max(asked) >= visible:
            run.error("trainer.devices", only, allowed=f"0 .. {visible - 1}")
    elif (count_devices(asked) or 0) > visible:
        run.error("trainer.devices", only, attempt=f"trainer.devices={visible}")


def _check_cores(run: Run, n_local: int) -> None:
    cores = count_cores()
    if n_local > cores:
        run.warn("trainer.devices", f"more processes than the {cores} cores here")
    workers = run.get("data.num_workers")
    if workers and workers * n_local > PROCESSES_PER_CORE * cores:
        run.error(
            "data.num_workers",
            f"{workers * n_local} processes in all, on {cores} cores",
            allowed=f"up to {PROCESSES_PER_CORE * cores // n_local}",
            attempt=f"data.num_workers={max(1, cores // n_local)}",
        )


def _check_memory(run: Run, split: ParallelDims, n_local: int, kind: str) -> None:
    """Weights, gradients and Adam's states of the largest rank against what a device has."""
    if run.get("model._target_") != "gptrain.models.SimpleGPT":
        return  # only our own net's size is known without making it
    if not run.sound(*(f"model.{key}" for key in SIZES)):
        return
    name = run.get("strategy.name")
    name = ("single" if run.world_size == 1 else "ddp") if name == "auto" else name
    per_rank = 2 if run.get("strategy.schedule") == "interleaved_1f1b" else 1
    shape = GPTShape(*(run.get(f"model.{key}") for key in SIZES))
    ends = {0, split.pipeline - 1}
    parameters = max(
        rank_parameters(name, shape, split, pipeline_rank=end, stages_per_rank=per_rank)
        for end in ends
    )
    trains = run.get("task") == "fit"
    need = parameters * (bytes_per_parameter("32-true", "torch.optim.AdamW") if trains else 4)
    offloads = bool(run.get("strategy.cpu_offload"))
    on_host = kind == "cpu" or offloads
    have = host_bytes() if on_host else min_device_bytes(n_local)
    if have is None or need * (n_local if on_host else 1) <= have:
        return
    what = "weights, gradients and Adam" if trains else "weights"
    if on_host:
        have_text = f"{have / GIB:.0f} GiB on this machine for {n_local} x that"
    else:
        have_text = f"{have / GIB:.0f} GiB per device x {n_local}"
    run.error(
        "model",
        f"needs about {need / GIB:.0f} GiB for {what}, {have_text}",
        value=None,
        attempt="model=gpt_nano"
        if on_host or name == "fsdp"
        else "strategy=fsdp or a smaller model",
    )


def host_bytes() -> int | None:
    """Memory of this machine, or what its control group leaves; None where neither is told."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return found
    return min(found, int(limit)) if limit.isdigit() else found


def min_device_bytes(n_local: int) -> int | None:
    """Memory of the smallest visible GPU."""
    visible = range(min(n_local, torch.cuda.device_count()))
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in visible]
    return min(sizes, default=None)
