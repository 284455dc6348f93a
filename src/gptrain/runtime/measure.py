"""FLOP/s of this machine's matrix products, from the data sheet or measured now."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from gptrain.costs.hardware import device_of

MEASURE_S = 0.15  # spent on measuring a peak that no table knows
CPU_SIDE, SIDE = 384, 8192  # of matrices: full speed, a millisecond on a CPU and at 1e15 FLOP/s


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device's matrix products, and where the number comes from."""

    flops_per_s: float
    source: str

    def __str__(self) -> str:
        unit, scale = ("TFLOP/s", 1e12) if self.flops_per_s >= 1e12 else ("GFLOP/s", 1e9)
        return f"peak {self.flops_per_s / scale:.0f} {unit} ({self.source})"


def find_peak(device: torch.device, precision: str) -> Peak:
    """The data sheet's dense 16-bit peak where the device is known, else one measured now.

    Args:
        precision: Lightning's name; decides what is measured.
    """
    if device.type == "cuda":
        known = device_of(torch.cuda.get_device_name(device))
        if known is not None:
            return Peak(known.flops_per_s["float16"], "data sheet, 16 bit")
    dtype = torch.float32
    if "16" in precision:
        dtype = torch.bfloat16 if "bf16" in precision else torch.float16
    return Peak(measure_matmul(device, dtype), f"measured, {str(dtype).removeprefix('torch.')}")


def measure_matmul(
    device: torch.device, dtype: torch.dtype, side: int | None = None, seconds: float = MEASURE_S
) -> float:
    """FLOP/s of the fastest of many square products, side x side, with today's threads.

    Of random numbers, as in training: a GPU at its power limit multiplies constants at a higher
    clock, because fewer bits toggle. No sum exceeds fp16: its standard deviation is sqrt(side).
    """
    side = side or (CPU_SIDE if device.type == "cpu" else SIDE)
    own = torch.Generator(device).manual_seed(0)  # the run's own numbers are not to shift
    left, right, out = (
        torch.randn(side, side, device=device, dtype=dtype, generator=own) for _ in range(3)
    )
    best_s, until_s = float("inf"), time.perf_counter() + seconds
    while best_s == float("inf") or time.perf_counter() < until_s:
        wait_for(device)
        start_s = time.perf_counter()
        torch.mm(left, right, out=out)
        wait_for(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * side**3 / best_s


def wait_for(device: torch.device) -> None:
    """Until all that it was given is done; a CPU is always."""
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
