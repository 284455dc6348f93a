"""Check that this machine has the devices and the memory that a run asks for. Imports torch."""

import os
from collections.abc import Iterator
from contextlib import suppress

from gptrain.config.check import CheckedConfig, check_cpu, check_world, find_world_size
from gptrain.core.errors import DONE, ConfigIssue
from gptrain.core.strategies import strategy_name
from gptrain.costs.choice import step_of
from gptrain.costs.step import states
from gptrain.runtime.process import count_devices, count_nodes, listed_numbers, this_process

GIB = 2**30


def check_devices(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield the problems of accelerator, backend, visible GPUs, number of ranks and memory.

    Only the accelerator is reported if this machine does not have it. The memory is checked only if
    nothing else is wrong, and gives a warning.

    Args:
        checked: Config without errors.
    """
    from torch.cuda import device_count as count_gpus
    from torch.distributed import is_backend_available

    from gptrain.runtime.devices import accelerator_of, count_local

    trainer = checked.run.trainer
    kind = accelerator_of(trainer.accelerator)
    if kind is None:
        names = {"gpu": "GPU", "cuda": "GPU", "mps": "Apple GPU"}
        name = names.get(trainer.accelerator, trainer.accelerator.upper())
        yield checked.error("trainer.accelerator", f"no {name} on this machine", "trainer=cpu")
        return
    n_local = count_local(trainer.devices, kind)
    if kind == "cpu":
        yield from check_cpu(checked)
    if (backend := checked.run.strategy.backend) and not is_backend_available(backend):
        built = ", ".join(filter(is_backend_available, ("nccl", "gloo", "mpi")))
        message = "the installed torch was built without this backend"
        yield checked.error("strategy.backend", message, allowed=built)
    if kind == "cuda":
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield from check_visible(checked, count_gpus(), variable, this_process().is_rank)
    world_size = find_world_size(checked.run) or n_local * count_nodes(trainer.num_nodes)
    yield from check_world(checked, world_size)
    if not checked.errors:
        yield from check_memory(checked, kind, n_local, world_size)


def check_visible(
    checked: CheckedConfig, n_visible: int, variable: str | None, is_rank: bool = False
) -> Iterator[ConfigIssue]:
    """Yield a problem if `trainer.devices` asks for a GPU that this process does not see.

    Args:
        checked: Config whose values were found valid.
        n_visible: Number of GPUs that this process sees.
        variable: Value of CUDA_VISIBLE_DEVICES, or None if it is not set.
        is_rank: Whether a launcher started this process as a rank. A launcher may show each rank
            only its own GPU, as index 0, so a rank may see a single GPU.
    """
    devices = checked.run.trainer.devices
    indices = listed_numbers(devices) or range(count_devices(devices) or 0)
    if max(indices, default=0) < n_visible or (is_rank and n_visible == 1):
        return
    message = f"only {n_visible} GPU{'' if n_visible == 1 else 's'} visible"
    message += f" (CUDA_VISIBLE_DEVICES={variable})" if variable is not None else ""
    yield checked.error("trainer.devices", message, f"trainer.devices={n_visible}")


def check_memory(
    checked: CheckedConfig, kind: str, n_local: int, world_size: int
) -> Iterator[ConfigIssue]:
    """Yield a warning if weights, gradients and optimizer states need more memory than there is.

    On GPUs the largest rank is compared with the smallest visible GPU. On CPUs, and with offloading
    to the CPU, all ranks of this machine are compared with the machine's memory. Nothing is yielded
    for other devices (`mps`), for an evaluation, and if the planner does not know the net, or
    cannot divide the run over the ranks, which `check_world` reports.

    Args:
        checked: Config whose values were found valid.
        kind: Type of the devices, `cuda`, `mps` or `cpu`.
        n_local: Number of ranks on this machine.
        world_size: Number of ranks of the job.
    """
    from torch import cuda

    run = checked.run
    step = None
    name = strategy_name(run.strategy.name, world_size)
    with suppress(ValueError):  # check_world reports sizes that do not divide
        step = step_of(run, run.data.sample_tokens, name, world_size)
    if step is None or run.task != "fit":
        return
    need = max(sum(states(end).values()) for end in step.ends)
    if kind == "cpu" or run.strategy.keeps_weights_on_cpu:
        where = "this machine"
        need *= n_local
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        where = "a device"
        visible = range(min(n_local, cuda.device_count()))
        have = min((cuda.get_device_properties(i).total_memory for i in visible), default=need)
    if need > have:
        content = "weights, gradients and optimizer states"
        message = f"{content} need about {need / GIB:.0f} GiB, {where} has {have / GIB:.0f} GiB"
        hint = "strategy=fsdp or a smaller model"
        yield ConfigIssue("model", None, message, hint=hint, code=DONE)
