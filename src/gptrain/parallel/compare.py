"""Compare a partitioned net with the plain net, once, before the first step of a run.

A strategy partitions a net under the assumptions of `gptrain.models`. A net that violates an
assumption would silently train another function. Therefore the logits and the gradients of both
nets are compared, with the same weights, on one small batch:

- The partitioned net is compared with `forward` of the plain net in evaluation mode, because in
  training its ranks draw other random numbers than one process.
- What happens in training only, for example a dropout that `forward` alone applies, is found in the
  plain net: the parts of it that the strategy calls, and blocks that recompute their activations,
  must give what `forward` gives from the same state of the random generators.

Both nets are built on the device of the rank in float64, in which rounding errors are far smaller
than real differences, or in float32 if the net fails in float64. Noise is added to the weights,
because a head of zeros would hide differences. Of a net with more than `_MAX_PARAMETERS` parameters
only the first blocks are compared. `model.compile` is not applied.
"""

# B batch, T time

import logging
import math
import random
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.loss import PLAIN_CROSS_ENTROPY
from gptrain.parallel.activation import apply_activation_checkpointing
from gptrain.parallel.base import Batch, Parallel, net_logits
from gptrain.parallel.mesh import from_rank_0, gather
from gptrain.parallel.placement import full_tensor, make_net_on
from gptrain.parallel.requirements import IncompatibleModelError

log = logging.getLogger(__name__)

_MAX_PARAMETERS = 2**27  # GPT-2 with 124 M parameters is compared with all of its blocks
_N_TOKENS = 32  # largest number of positions of a sample
# Largest difference, as a fraction of the largest value. Under float64, parts of a net that always
# compute in float32 cause differences of about 1e-6.
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-2}
_LIBRARIES = ("gptrain.models.", "torch.nn.modules.")
_LOGITS, _GRADIENT = "the output", "the gradient of "
_Tensors = dict[str, Tensor]  # by the names that a message shows


def is_of_library(net: nn.Module) -> bool:
    """Return whether all layers of a net are of gptrain.models or torch.nn, and unchanged.

    A layer with a buffer or a forward hook is changed, or one whose `forward`, `embed` or `hidden`
    was replaced on the object.
    """
    return all(
        type(part).__module__.startswith(_LIBRARIES)
        and not {"forward", "embed", "hidden"} & vars(part).keys()
        and not (part._forward_hooks or part._forward_pre_hooks or part._buffers)
        for part in net.modules()
    )


@dataclass(frozen=True)
class Comparison:
    """Comparison of a net under a strategy with the plain net, the same net without partitioning.

    Attributes:
        full_net: Net before it is partitioned, for example on the meta device.
        make_net: Function that builds the net. It is called several times.
        parallel: Strategy of the run.
        mode: Value of model.activation_checkpointing: none, selective or full.
    """

    full_net: nn.Module
    make_net: Callable[[], nn.Module]
    parallel: Parallel
    mode: str

    def check(self, sample: Tensor) -> None:
        """Check that the strategy trains the function that the net computes.

        All ranks must call this method, before the net of the run is built. It changes the state of
        the random generators. If the plain net fails on the sample, nothing is compared, and a
        partitioning strategy logs a warning. Outside of a pipeline, sets `parallel.forward_only` if
        nothing was compared, or, with a warning, if `hidden` and `head` compute other logits than
        `forward` in training.

        Args:
            sample: Tokens (T,) of one sample of the data, integers. Rank 0's sample is used.

        Raises:
            IncompatibleModelError: If the nets differ, or if the partitioned net fails. Errors of
                memory and of communication pass unchanged.
        """
        parallel, sample = self.parallel, from_rank_0(sample)
        reason, dtype_before = "", torch.get_default_dtype()
        try:
            for dtype, is_padded in product(_TOLERANCES, (True, False)):
                torch.set_default_dtype(dtype)
                batch = _make_batch(sample, parallel, is_padded)
                self._compare_in_training(batch)
                if not (reason := self._compare_partitioned(batch)):
                    return
        finally:
            torch.set_default_dtype(dtype_before)
        if parallel.is_partitioned:
            message = "warning: the partitioned net was not compared with the plain net"
            log.warning("%s: %s", message, reason)
        # `hidden` and `head` may compute other logits than `forward`.
        parallel.forward_only = not parallel.is_pipeline

    def _compare_in_training(self, batch: Batch) -> None:
        """Compare `forward` with the parts that the strategy calls, and with recomputing blocks."""
        parallel = self.parallel
        expected, reason = self._run(batch, training=True)
        if _first(gather(reason)):  # _compare_partitioned reports what is wrong with `forward`
            return

        def difference(compute_logits: Callable[..., Tensor], mode: str) -> str:
            found, reason = self._run(batch, True, compute_logits, mode)
            return from_rank_0(reason or _first_difference(expected, found))

        if self.mode != "none" and (text := difference(net_logits, self.mode)):
            message = f"in training {text} if blocks run twice; allowed: none"
            raise IncompatibleModelError("model.activation_checkpointing", message)
        calls_parts = parallel.is_pipeline or parallel.uses_hidden(self.full_net)
        if calls_parts and (text := difference(parallel.logits_of_parts, "none")):
            if parallel.is_pipeline:
                raise self._error(f"in training {text}")
            parallel.forward_only = True
            message = "warning: the loss is computed from the logits of forward"
            log.warning("%s, which takes more memory: for hidden and head, %s", message, text)

    def _compare_partitioned(self, batch: Batch) -> str:
        """Compare the partitioned net, and return why the plain net cannot be run, or ""."""
        expected, reason = self._run(batch, training=False)
        if reason := _first(gather(reason)):
            return reason
        parallel = copy(self.parallel)
        parallel.precision = "32-true"  # FSDP then keeps the dtype of the comparison
        try:
            net = self._build(parallel.weights_device)
            parallel.partition(net, self.mode, compile="none")
            chunks = [logits for logits, _ in parallel.logits(net, batch)]
            if any(parameter.requires_grad for parameter in self.full_net.parameters()):
                _seed()
                parallel.mean_loss(net, batch, PLAIN_CROSS_ENTROPY).backward()
                parallel.finish_gradients()
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:  # a user's net can raise anything
            raise self._error(_first_cause(error)) from error
        found = ({_LOGITS: torch.cat(chunks)} if chunks else {}) | self._gradients(net)
        # The last stage of a pipeline has the logits.
        if text := _first(reversed(gather(_first_difference(expected, found)))):
            raise self._error(text)
        return ""

    def _run(
        self, batch: Batch, training: bool, compute_logits: Any = net_logits, mode: str = "none"
    ) -> tuple[_Tensors, str]:
        """Return what a plain net computes and changes, and the cause if it fails."""
        try:
            net = self._build(self.parallel.device).train(training)
            apply_activation_checkpointing(net, mode)
            logits = compute_logits(net, batch.tokens, batch.targets).flatten(0, -2)
            if logits.requires_grad:
                F.cross_entropy(logits, batch.targets.flatten()).backward()
        except Exception as error:  # a user's net can raise anything
            return {}, _first_cause(error)
        drawn = [float(torch.rand(())), random.random(), numpy.random.rand()]
        results = {_LOGITS: logits.detach(), "the use of random numbers": torch.tensor(drawn)}
        results |= {f"the buffer {name}": buffer for name, buffer in net.named_buffers()}
        return results | self._gradients(net), ""

    def _build(self, device: torch.device | str) -> Any:
        """Build the plain net with noise in its weights, and seed the generators it may use."""
        _seed()
        net = make_net_on(device, self.make_net, lambda net: _prepare_net(net, self.parallel))
        on = self.parallel.device
        generator = torch.Generator(on).manual_seed(0)
        for parameter in net.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, device=on)
                noise *= 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
                parameter.data += noise.to(parameter)
        _seed()
        return net

    def _gradients(self, net: nn.Module) -> _Tensors:
        """Return the full gradients by name, the last first. A missing one counts as zeros."""
        gradients: _Tensors = {}
        for name, parameter in reversed([*net.named_parameters()]):
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[_GRADIENT + name] = full_tensor(gradient.to(self.parallel.device))
        return gradients

    def _error(self, difference: str) -> IncompatibleModelError:
        """Return the error of a net that the strategy would not train as it is."""
        key = "strategy.name" if self.parallel.is_partitioned else "model._target_"
        message = f"would train another function than this net: {difference}"
        return IncompatibleModelError(key, f"{message}; gptrain.models has what a net must do")


def _first_difference(expected: _Tensors, found: _Tensors) -> str:
    """Return "<name> differs" for the first tensor in `found` that is not as expected, or ""."""
    tolerance = _TOLERANCES[torch.get_default_dtype()]
    sizes = {name: _largest(tensor) for name, tensor in expected.items()}
    least = 1e-2 * max((sizes[n] for n in sizes if n.startswith(_GRADIENT)), default=0.0)
    for name, tensor in found.items():
        bound = tolerance * max(sizes[name], least if name.startswith(_GRADIENT) else 0.0)
        a, b = _comparable(expected[name]), _comparable(tensor)
        if a.shape != b.shape or not torch.allclose(b, a, rtol=0.0, atol=bound, equal_nan=True):
            return f"{name} differs"
    return ""


def _make_batch(sample: Tensor, parallel: Parallel, is_padded: bool) -> Batch:
    """Return beginnings of rotated copies of a sample, of a length that has to be padded or not."""
    n_tokens, n_ranks = min(len(sample), _N_TOKENS), parallel.dims.tensor * parallel.dims.context
    if is_padded and n_ranks > 1 and n_tokens % n_ranks == 0:
        n_tokens -= 1
    n_rows = max(2, parallel.microbatches)
    rows = [sample.roll(-row * n_tokens - row)[:n_tokens] for row in range(n_rows)]
    tokens = torch.stack(rows).to(parallel.device, torch.int64)
    return Batch(tokens, tokens.roll(-1, 1))


def _prepare_net(net: nn.Module, parallel: Parallel) -> None:
    """Set evaluation mode and the default dtype of a full net. Of a large net keep few blocks."""
    blocks = net._modules.get("blocks")
    n_parameters = sum(parameter.numel() for parameter in net.parameters())
    if n_parameters > _MAX_PARAMETERS and isinstance(blocks, nn.ModuleList):
        net.blocks = blocks[: max(2, parallel.dims.pipeline)]
    net.eval()
    if torch.get_default_dtype() == torch.float64:
        net.double()  # unlike .to(), double() keeps complex buffers


def _first_cause(error: BaseException) -> str:
    """Return "type: message" of the first exception in a chain of causes, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())


def _comparable(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, because MPS has no float64, in a type for all numbers."""
    return tensor.detach().cpu().to(torch.complex128)


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor, 0 if it is empty."""
    return float(_comparable(tensor).abs().nan_to_num().max()) if tensor.numel() else 0.0


def _seed() -> None:
    """Let a net draw the same random numbers again, for its initial weights or in a pass."""
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)


def _first(texts: Iterable[str]) -> str:
    """Return the first text that is not empty, or an empty string."""
    return next(filter(None, texts), "")
