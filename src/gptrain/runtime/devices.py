"""What the run will stand on: accelerator, devices, ranks, threads. Imports torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from gptrain.core.schema import RunConfig
from gptrain.costs.machine import count_cores
from gptrain.runtime.process import count_devices, count_nodes, listed_numbers, this_process


@dataclass(frozen=True)
class RunDevices:
    """Devices of one run.

    Attributes:
        accelerator: Lightning's name: cpu, cuda, mps, tpu.
        n_local: ranks on this node.
        n_nodes: nodes of the job.
        gpu_numbers: of the local ranks, where trainer.devices lists them; else empty.
    """

    accelerator: str
    n_local: int
    n_nodes: int
    gpu_numbers: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.n_local * self.n_nodes

    @property
    def backend(self) -> str:
        """The collectives that fit the devices."""
        return "nccl" if self.accelerator == "cuda" else "gloo"

    def device(self, local_rank: int) -> torch.device:
        """The device of one local rank, by the number that it has in this process."""
        if self.accelerator == "cuda":
            if torch.cuda.device_count() == 1:  # `srun --gpus-per-task=1` shows each rank its own
                return torch.device("cuda", 0)
            numbers = self.gpu_numbers
            return torch.device("cuda", numbers[local_rank] if numbers else local_rank)
        return torch.device(self.accelerator if self.accelerator == "mps" else "cpu")


def find_devices(cfg: RunConfig) -> RunDevices:
    """Resolves trainer.accelerator and trainer.devices as Lightning does, but starts nothing."""
    accelerator = accelerator_of(str(cfg.trainer.accelerator)) or "cpu"
    devices, n_nodes = cfg.trainer.devices, count_nodes(cfg.trainer.num_nodes)
    n_local = count_local(devices, accelerator)
    return RunDevices(accelerator, n_local, n_nodes, listed_numbers(devices))


def accelerator_of(asked: str) -> str | None:
    """cpu, cuda, mps or tpu, for Lightning's name of it; None where this machine has none."""
    is_here = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "tpu": lambda: find_spec("torch_xla") is not None,
        "cpu": lambda: True,
    }
    wanted = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}.get(asked, (asked,))
    return next((name for name in wanted if is_here[name]()), None)


def native_precision(machine: RunDevices) -> str:
    """What trainer.precision=auto stands for on the devices of this machine."""
    major = torch.cuda.get_device_capability()[0] if machine.accelerator == "cuda" else 0
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return precision_for(machine.accelerator, major, has_bf16)


def precision_for(accelerator: str, cuda_major: int, cpu_has_bf16: bool) -> str:
    """bf16-mixed where products in bf16 are native, else 32-true.

    Args:
        cuda_major: of the GPU's compute capability; 8 is Ampere, the first that has them.
        cpu_has_bf16: whether it has AVX512-BF16 or AMX; without, bf16 is slower than fp32.
    """
    native = {"cuda": cuda_major >= 8, "cpu": cpu_has_bf16}
    return "bf16-mixed" if native.get(accelerator, False) else "32-true"


def set_threads(n_local: int) -> None:
    """Gives this rank its cores, in threads. OMP_NUM_THREADS, where set, is obeyed."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores_per_rank(n_local))


def cores_per_rank(n_local: int) -> int:
    """The cores of this node, divided by its ranks.

    Of a SLURM task what it asked for: its cores may be its own already, or those of all tasks.
    """
    if this_process().launcher == "slurm" and "SLURM_CPUS_PER_TASK" in os.environ:
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    return max(1, count_cores() // n_local)


def count_local(devices: object, accelerator: str) -> int:
    """Ranks on this node, of trainer.devices in any of its forms."""
    if (asked := count_devices(devices)) is not None:
        return asked
    process = this_process()
    if process.is_rank:
        return process.world_size // process.n_nodes
    return torch.cuda.device_count() if accelerator == "cuda" else 1
