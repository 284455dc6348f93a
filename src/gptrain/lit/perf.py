"""What perf/* is: the time of a step, its FLOPs over the peak of the device, and peak memory."""

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn

from gptrain.core.lengths import RunLengths
from gptrain.costs.flops import train_flops_per_token
from gptrain.lit.lightning import connected, data_of, strategy_of
from gptrain.runtime.measure import find_peak, wait_for


class Speed:
    """Times the steps of a training.

    Attributes:
        peak: of one device, what perf/mfu is measured against; known on rank 0.
        trained_s: Seconds of all steps that were read, but for the first, in which workers start.
        waited_s: Seconds of `trained_s` in which training waited for a batch.
    """

    trained_s = waited_s = 0.0

    def __init__(self, lengths: RunLengths, trainer: pl.Trainer, net: nn.Module | None):
        self.lengths, self.trainer = lengths, trainer
        self.device = trainer.strategy.root_device
        self.peak = None
        self._is_warm = False
        self.token_flops = 0
        if net is not None:  # attention counts where the net tells its sizes
            layers, width = getattr(net, "n_layers", 0), getattr(net, "d_model", 0)
            n_weights, seq_len = strategy_of(trainer).info.n_matrix_weights, lengths.sample_tokens
            self.token_flops = train_flops_per_token(n_weights, layers, width, seq_len)
        if trainer.is_global_zero and not connected(trainer).fast_dev_run:
            self.peak = find_peak(self.device, trainer.precision)
        self.start()

    def start(self) -> None:
        """Begins anew: what was before is in no figure."""
        wait_for(self.device)  # the clock is read when the step is done
        waited_s = connected(self.trainer).train_dataloader.waited_s
        self._last = self.trainer.global_step, time.perf_counter(), waited_s

    def read(self) -> dict[str, float]:
        """Logged names and values, of the steps since it began or was last read."""
        last = self._last
        self.start()
        steps, seconds, waited_s = (now - then for now, then in zip(self._last, last, strict=True))
        step_s, step_tokens = seconds / max(1, steps), self.lengths.step_tokens
        if self._is_warm:
            self.trained_s += seconds
            self.waited_s += waited_s
        self._is_warm = True
        metrics = {
            "tokens": float(data_of(self.trainer).tokens),
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


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new measurement of the peak memory, where the platform can.

    A sweep runs its jobs in one process, and a job's peak is not that of an earlier job.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # Linux alone has this file, and a container may forbid to write it
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has held: of its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration):
        status = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024  # VmHWM: 123456 kB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def count_matrix_weights(net: nn.Module) -> int:
    """Weights that multiply each token: all matrices, without tables that are only looked up in."""
    layers = (layer for layer in net.modules() if not isinstance(layer, nn.Embedding))
    weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
    return sum(weight.numel() for weight in weights if weight.ndim >= 2)
