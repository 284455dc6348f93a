"""The logged values perf/*: time per step, FLOP/s relative to the device's peak, peak memory."""

import resource
import sys
import time

import lightning.pytorch as pl
import torch
from torch import nn

from gptrain.costs.net import train_flops_per_token
from gptrain.lit.lightning import data_of, strategy_of
from gptrain.lit.measure import find_peak, wait_for
from gptrain.lit.module import LanguageModel


class Speed:
    """Measures the speed of a training over intervals of several optimizer steps.

    Build it when the training begins, which begins the first interval: `trainer` has its training
    data loader.

    Args:
        trainer: Trainer that is fitting. perf/mfu is left out unless its module is a LanguageModel.

    Attributes:
        peak: Peak FLOP/s of one device, and its text. None on ranks other than 0.
    """

    peak: tuple[float, str] | None = None
    _token_flops = 0

    def __init__(self, trainer: pl.Trainer):
        self._trainer = trainer
        self._lengths = data_of(trainer).lengths
        self._device = trainer.strategy.root_device
        if isinstance(trainer.lightning_module, LanguageModel):
            net = strategy_of(trainer).full_net
            # A net without these attributes is counted without the FLOPs of its attention scores.
            d_head = getattr(net, "d_head", None)
            width = getattr(net, "n_heads", 0) * d_head if d_head else getattr(net, "d_model", 0)
            n_weights = count_matrix_weights(net)
            n_layers = getattr(net, "n_layers", 0)
            seq_len = self._lengths.sample_tokens
            self._token_flops = train_flops_per_token(n_weights, n_layers, width, seq_len)
        if trainer.is_global_zero:
            self.peak = find_peak(self._device, trainer.precision)
        self.start()

    def start(self) -> None:
        """Begin a new interval when the device has done the work that was queued."""
        wait_for(self._device)
        waited_s = getattr(self._trainer.train_dataloader, "waited_s", 0.0)
        self._begin = (self._trainer.global_step, time.perf_counter(), waited_s)

    def read(self) -> dict[str, float]:
        """Wait for the device, end the interval, begin a new one, and return the values by name.

        The names are `tokens` and those of perf/* in `TrainingMonitor`, which also has their units.
        perf/mfu is left out on ranks other than 0, and perf/gpu_mem_peak_gib on
        devices other than CUDA.
        """
        begin = self._begin
        self.start()
        steps, seconds, waited_s = (b - a for a, b in zip(begin, self._begin, strict=True))
        n_steps = max(1, steps)
        step_s = seconds / n_steps
        tokens_per_s = self._lengths.step_tokens / step_s
        metrics = {
            "tokens": float(data_of(self._trainer).tokens),
            "perf/tokens_per_s": tokens_per_s,
            "perf/step_s": step_s,
            "perf/data_wait_s": waited_s / n_steps,
        }
        if self.peak is not None and self._token_flops:
            flops_per_s = self._token_flops * tokens_per_s / self._trainer.world_size
            metrics["perf/mfu"] = flops_per_s / self.peak[0]
        if self._device.type == "cuda":
            metrics["perf/gpu_mem_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process, in bytes: on a CUDA device that of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def count_matrix_weights(net: nn.Module) -> int:
    """Return the number of weights of a net that multiply activations, each shared one once.

    These are all parameters with at least two dimensions, except those that only nn.Embedding
    holds.
    """
    layers = (layer for layer in net.modules() if not isinstance(layer, nn.Embedding))
    weights = {weight for layer in layers for weight in layer.parameters(recurse=False)}
    return sum(weight.numel() for weight in weights if weight.ndim >= 2)
