"""Accelerator, devices, precision and threads of a run, resolved on this machine by torch."""

import os
from dataclasses import dataclass

import torch

from gptrain.core.errors import ConfigError
from gptrain.core.precision import find_precision
from gptrain.core.schema import RunConfig
from gptrain.runtime.process import count_cores, count_devices, this_process


@dataclass(frozen=True)
class RunDevices:
    """Devices of one run on all of its nodes, one device for each rank.

    Attributes:
        accelerator: Lightning's name of the accelerator: "cpu", "cuda" or "mps".
        n_local: Number of ranks on this node.
        n_nodes: Number of nodes of the job.
        gpu_numbers: GPU index of each local rank, if trainer.devices lists them; otherwise empty.
    """

    accelerator: str
    n_local: int
    n_nodes: int
    gpu_numbers: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks of the job, on all nodes."""
        return self.n_local * self.n_nodes

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a local rank, with the index that the device has in this process.

        A process that sees a single GPU gets index 0, whatever its rank is.
        """
        if self.accelerator != "cuda":
            return torch.device(self.accelerator)
        index = self.gpu_numbers[local_rank] if self.gpu_numbers else local_rank
        # `srun --gpus-per-task=1` shows each rank one GPU.
        return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else index)


def find_devices(cfg: RunConfig) -> RunDevices:
    """Return the devices of a run, resolved from the trainer group as Lightning does.

    "auto" devices are those of the launcher, else all CUDA GPUs, else one device. Raises a
    ConfigError if this machine lacks the accelerator or a device, if a launcher has started other
    numbers of nodes or ranks, or for fp16 on a CPU.
    """
    accelerator, process = accelerator_of(cfg.trainer.accelerator), this_process()
    devices, precision = cfg.trainer.devices, cfg.trainer.precision
    if (n_nodes := cfg.trainer.num_nodes) not in ("auto", process.n_nodes):
        message, hint = f"ranks start on {process.n_nodes} node(s)", "torchrun --nnodes, or srun"
        raise ConfigError.of("trainer.num_nodes", n_nodes, message, hint=hint)
    if accelerator == "cpu" and find_precision(precision).is_fp16:
        hint = "trainer.precision=bf16-mixed"  # Lightning would take it without an error
        raise ConfigError.of("trainer.precision", precision, "not supported on CPU", hint=hint)
    n_visible = torch.cuda.device_count() if accelerator == "cuda" else 1
    n_local = count_devices(devices) or n_visible
    if (n_started := count_devices("auto")) not in (None, n_local):
        message = f"the launcher has started {n_started} ranks on each node"
        raise ConfigError.of("trainer.devices", devices, message, f"trainer.devices={n_started}")
    numbers = tuple(devices) if isinstance(devices, list) else ()
    is_own = process.is_rank and n_visible == 1  # the launcher shows one GPU to a rank
    if accelerator == "cuda" and max(numbers or [n_local - 1]) >= n_visible and not is_own:
        message, hint = f"{n_visible} visible here", f"trainer.devices={n_visible}"
        raise ConfigError.of("trainer.devices", devices, message, hint=hint)
    return RunDevices(accelerator, n_local, process.n_nodes, numbers)


def accelerator_of(name: str) -> str:
    """Return "cuda", "mps" or "cpu" for trainer.accelerator.

    `auto` takes CUDA, MPS or the CPU, the first that this machine has, and `gpu` CUDA or MPS.
    Raises a ConfigError if this machine lacks it.
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    candidates = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}.get(name, (name,))
    if found := next((candidate for candidate in candidates if has[candidate]), None):
        return found
    raise ConfigError.of("trainer.accelerator", name, "not on this machine", hint="trainer=cpu")


def native_precision(devices: RunDevices) -> str:
    """Return the precision that trainer.precision=auto means on these devices.

    It is `bf16-mixed` on a GPU that multiplies bf16 matrices natively, from compute capability 8
    (Ampere) on, else `32-true`: bf16 is faster only on some CPUs.
    """
    is_native = devices.accelerator == "cuda" and torch.cuda.get_device_capability()[0] >= 8
    return "bf16-mixed" if is_native else "32-true"


def set_threads(n_local: int) -> None:
    """Divide this process's cores by `n_local` ranks, and give torch as many threads, at least 1.

    Does nothing if OMP_NUM_THREADS is set.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, count_cores() // n_local))
