"""Peak speed of a device in matrix multiplications."""

import time
from dataclasses import dataclass

import torch

from gptrain.core.precision import TYPE_BYTES, find_precision
from gptrain.costs.hardware import device_of, machine_of

MEASURE_S = 0.15  # duration of the measurement for a device without a data sheet, in seconds
# Sides of the matrices on a CPU and on other devices. Both are large enough for full speed, and one
# multiplication takes about a millisecond (on a GPU with 1e15 FLOP/s).
CPU_SIDE = 384
SIDE = 8192


@dataclass(frozen=True)
class Peak:
    """Peak speed of one device.

    Attributes:
        flops_per_s: Floating-point operations per second in matrix multiplications.
        source: Source of the number: the data sheet or a measurement.
    """

    flops_per_s: float
    source: str

    def __str__(self) -> str:
        unit, scale = ("TFLOP/s", 1e12) if self.flops_per_s >= 1e12 else ("GFLOP/s", 1e9)
        return f"peak {self.flops_per_s / scale:.0f} {unit} ({self.source})"


def find_peak(device: torch.device, precision: str) -> Peak:
    """Return the peak speed of a device in matrix multiplications, from a table or by measurement."""
    if device.type == "cuda":
        known = device_of(torch.cuda.get_device_name(device))
        if known is not None:
            machine = machine_of(known, 1)
            return Peak(machine.flops_per_s["float16"] / machine.matmul, "data sheet, 16 bit")
    matmul = find_precision(precision).matmul
    dtype = getattr(torch, matmul) if TYPE_BYTES[matmul] == 2 else torch.float32
    return Peak(measure_matmul(device, dtype), f"measured, {str(dtype).removeprefix('torch.')}")


def measure_matmul(
    device: torch.device, dtype: torch.dtype, side: int | None = None, seconds: float = MEASURE_S
) -> float:
    """Return the FLOP/s of the fastest of many multiplications of two square matrices."""
    side = side or (CPU_SIDE if device.type == "cpu" else SIDE)
    generator = torch.Generator(device).manual_seed(0)
    left, right, out = (
        torch.randn(side, side, device=device, dtype=dtype, generator=generator) for _ in range(3)
    )
    best_s = float("inf")
    end_s = time.perf_counter() + seconds
    while best_s == float("inf") or time.perf_counter() < end_s:
        wait_for(device)
        start_s = time.perf_counter()
        torch.mm(left, right, out=out)
        wait_for(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * side**3 / best_s


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA or MPS device has finished all queued work. Does nothing for any other."""
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
