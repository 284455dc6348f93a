"""Peak speed of a device in matrix multiplications."""

import torch

from gptrain.core.precision import TYPE_BYTES, find_precision
from gptrain.costs.hardware import device_of, machine_of

_MEASURE_S = 0.1  # duration of the measurement for a device without a data sheet, in seconds
# Sides of the matrices on a CPU and on other devices. Both are large enough for full speed, and one
# multiplication takes about a millisecond (on a GPU with 1e15 FLOP/s).
_CPU_SIDE = 384
_SIDE = 8192


def find_peak(device: torch.device, precision: str) -> tuple[float, str]:
    """Return the peak speed of a device in FLOP/s, and a text with the speed and its source.

    For a GPU that `costs.hardware` knows it is the dense 16-bit peak of the data sheet. For other
    devices it is measured, in the 16-bit type of `precision` (Lightning's name) or, if that has
    none, in fp32.
    """
    known = device_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if known is not None:
        machine = machine_of(known, 1)
        flops_per_s, source = machine.flops_per_s["float16"] / machine.matmul, "data sheet, 16 bit"
    else:
        name = find_precision(precision).matmul
        name = name if TYPE_BYTES[name] == 2 else "float32"
        flops_per_s, source = measure_matmul(device, getattr(torch, name)), f"measured, {name}"
    unit, scale = ("TFLOP/s", 1e12) if flops_per_s >= 1e12 else ("GFLOP/s", 1e9)
    return flops_per_s, f"peak {flops_per_s / scale:.0f} {unit} ({source})"


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of multiplications of two square matrices with random values.

    The matrices have the given type. The random generators of the run do not change.
    """
    from torch.utils.benchmark import Timer  # takes 0.1 s, and a known GPU needs none

    side = _CPU_SIDE if device.type == "cpu" else _SIDE
    generator = torch.Generator(device).manual_seed(0)  # the random numbers of the run stay
    left, right = torch.randn(2, side, side, device=device, dtype=dtype, generator=generator)
    timer = Timer(
        "torch.mm(left, right)",
        globals={"left": left, "right": right},
        num_threads=torch.get_num_threads(),
    )
    return 2 * side**3 / timer.blocked_autorange(min_run_time=_MEASURE_S).median


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA or MPS device has finished all queued work. Does nothing for any other."""
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
