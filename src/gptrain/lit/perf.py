"""What perf/* is: the time of a step, the FLOPs of a token, the peak of the device they run on."""

import time
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import nn

from gptrain.costs.flops import train_flops_per_token
from gptrain.costs.hardware import device_of
from gptrain.lengths import Lengths

MEASURE_S = 0.15  # spent on measuring a peak that no table knows
SIDE = {"cpu": 384, "mps": 4096}  # of the matrices multiplied: full speed, a millisecond each
LARGE_SIDE = 8192  # on anything faster: a GPU of 1e15 FLOP/s takes a millisecond, too


class Speed:
    """Times the steps of a training.

    Attributes:
        peak: of one device, what perf/mfu is measured against; known on rank 0.
    """

    def __init__(self, lengths: Lengths, trainer: pl.Trainer, net: nn.Module | None):
        self.lengths, self.trainer, self.device = lengths, trainer, trainer.strategy.root_device
        self.peak, self.token_flops = None, 0
        if net is not None:  # attention counts where the net tells its sizes
            layers, width = getattr(net, "n_layers", 0), getattr(net, "d_model", 0)
            n_weights, seq_len = trainer.strategy.info.n_matrix_weights, lengths.sample_tokens
            self.token_flops = train_flops_per_token(n_weights, layers, width, seq_len)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.peak = find_peak(self.device, trainer.precision)
        self.start()

    def start(self) -> None:
        """Begins anew: what was before is in no figure."""
        wait_for(self.device)  # the clock is read when the step is done
        now = self.trainer.global_step, time.perf_counter(), self.trainer.datamodule.waited_s
        self._last = now

    def read(self) -> dict[str, float]:
        """Logged names and values, of the steps since it began or was last read."""
        last = self._last
        self.start()
        steps, seconds, waited_s = (now - then for now, then in zip(self._last, last, strict=True))
        step_s, step_tokens = seconds / max(1, steps), self.lengths.step_tokens
        metrics = {
            "tokens": float(self.trainer.global_step * step_tokens),
            "perf/tokens_per_s": step_tokens / step_s,
            "perf/step_s": step_s,
            "perf/data_wait_s": waited_s / max(1, steps),
        }
        if self.peak is not None and self.token_flops:
            flops_per_s = self.token_flops * step_tokens / step_s / self.trainer.world_size
            metrics["perf/mfu"] = flops_per_s / self.peak.flops_per_s
        if self.device.type == "cuda":
            metrics["perf/gpu_mem_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics


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
    side = side or SIDE.get(device.type, LARGE_SIDE)
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


def count_matrix_weights(net: nn.Module) -> int:
    """Weights that multiply each token: all matrices, without tables that are only looked up in."""
    multiplied = {id(layer.weight) for layer in net.modules() if isinstance(layer, nn.Linear)}
    looked_up = {id(layer.weight) for layer in net.modules() if isinstance(layer, nn.Embedding)}
    only_looked_up = looked_up - multiplied
    return sum(p.numel() for p in net.parameters() if p.ndim >= 2 and id(p) not in only_looked_up)


def wait_for(device: torch.device) -> None:
    """Until all that it was given is done; a CPU is always."""
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
