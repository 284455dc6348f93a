"""Compare a partitioned net with the plain net, once, before the first step of a run.

A strategy partitions a net under the assumptions of `gptrain.models`: the number of heads follows
from the width of q, k and v, `forward` is the chain of the net's parts, and so on. A net that
violates an assumption would silently train another function. To find such a net, the plain net and
the partitioned net get the same weights and the same small batch, and their logits and gradients
are compared.

- The weights are the initial weights plus noise, because a head or a projection of zeros would hide
  differences. Both nets are discarded afterwards; the weights of the run do not change.
- Both nets are in evaluation mode and in float64, in which rounding errors are far smaller than
  real differences. A net that fails in float64 is compared in the type in which it is built, with
  a wider tolerance.
- Both nets are built on the device of the rank. A rank holds the full plain net and its gradients
  for a moment, 16 bytes per parameter. If a net has more than `MAX_PARAMETERS` parameters, only its
  first blocks are compared: as many as a pipeline has stages, and at least 2. A difference that
  occurs only in later blocks is then not found. If even these blocks do not fit into memory, the
  nets are not compared, and a warning says so.
- `model.compile` is not applied, because the compiled code would fill the compiler's cache.

The partitioned net is compared in evaluation mode, because its ranks draw other random numbers than
one process. What differs in training only, for example a dropout that `forward` alone applies, is
found in the plain net: in training mode, and from the same state of the random generators, the
parts of the net that the strategy calls must give the loss and the gradients of `forward`. If
`hidden` and `head` do not, the loss of the run is computed from `forward`.

The comparison does not depend on the strategy: it calls `ParallelStrategy.logits` and
`ParallelStrategy.mean_loss`, so that every new strategy is compared, too.
"""

# B batch, T time

import hashlib
import logging
import math
import os
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.loss import PLAIN_CROSS_ENTROPY
from gptrain.parallel.differences import (
    PlainResult,
    compare_gradients,
    compare_logits,
    relative_difference,
)
from gptrain.parallel.mesh import from_rank_0, gather
from gptrain.parallel.placement import (
    build_on_meta_device,
    local_shard,
    make_net_on,
    shard_like,
)
from gptrain.parallel.requirements import IncompatibleModelError, Net, tied_names
from gptrain.parallel.strategy import ParallelStrategy, net_logits, supports_chunked_loss

log = logging.getLogger(__name__)

MAX_PARAMETERS = 2**27  # GPT-2 with 124 M parameters is compared with all of its blocks
BYTES_PER_PARAMETER = 16  # weights and gradients of the plain net, or weights of both nets, in fp64
N_TOKENS = 32  # positions of a sample; `make_batch` adds up to world_size - 1 positions
# Largest difference, as a fraction of the largest value. Under float64, parts of a net that always
# compute in float32 cause differences of about 1e-6. If the batch size changes the logits of the
# plain net, ten times that difference is tolerated.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-2}
# Packages whose classes need no comparison.
LIBRARIES = ("gptrain.models.", "torch.nn.")


class IncomparableError(Exception):
    """Raised if the plain (unpartitioned) net cannot be used for a comparison.

    The message is the reason.
    """


def needs_comparison(
    net: nn.Module, parallel: ParallelStrategy, activation_checkpointing: str
) -> bool:
    """Return whether the net could compute another function under the strategy.

    A net of gptrain.models that consists of unchanged layers of gptrain.models and torch.nn needs
    no comparison (see `is_of_library`): gptrain's tests compare it with a single process. Any other
    net, for example one with a single layer of another class or with a forward hook, is compared if
    the strategy partitions the net, if the net has `hidden` and `head`, from which the loss is then
    computed instead of from `forward`, or if activation checkpointing runs blocks twice.

    Args:
        net: Net before it is partitioned, for example on the meta device.
        parallel: Strategy of the run.
        activation_checkpointing: "none", "selective" or "full", the activations that each block
            recomputes.
    """
    recomputes = activation_checkpointing != "none"
    changes = parallel.is_partitioned or supports_chunked_loss(net) or recomputes
    return changes and not is_of_library(net)


def is_of_library(net: nn.Module) -> bool:
    """Return whether a net is of a class of gptrain.models and consists of unchanged layers only.

    All layers must be of classes of gptrain.models and torch.nn, not of subclasses from other
    packages. A net with forward hooks, with parametrizations of torch.nn.utils, or with a method
    `forward`, `embed` or `hidden` that was replaced on the object does not count as unchanged. A
    model of transformers does not, either.
    """
    if not type(net).__module__.startswith("gptrain.models.") or "hidden" in vars(net):
        return False
    return all(
        f"{type(part).__module__}.".startswith(LIBRARIES)
        and not type(part).__module__.startswith("torch.nn.utils.")  # no parametrizations
        and not {"forward", "embed"} & vars(part).keys()
        and not part._forward_hooks
        and not part._forward_pre_hooks
        for part in net.modules()
    )


@dataclass(frozen=True)
class Comparison:
    """Comparison of a net under a strategy with the plain net, the same net without partitioning.

    The method `check` runs the comparison.

    Attributes:
        make_net: Function that builds the net, with the same initial weights in every call.
        partition: Function that changes a full net in place into the part that this rank runs.
        parallel: Strategy of the run. The comparison uses a copy with the same process groups.
        weights_device: Device of the weights of the partitioned net.
        key: Config key that an error names.
        contract: Requirements of the strategy, for the error message.
        checkpoint: Function that applies the activation checkpointing of the run to a full net, or
            None.
    """

    make_net: Callable[[], nn.Module]
    partition: Callable[[nn.Module, ParallelStrategy], None]
    parallel: ParallelStrategy
    weights_device: torch.device | str
    key: str
    contract: str
    checkpoint: Callable[[nn.Module], None] | None = None

    def check(self, sample: Tensor) -> None:
        """Check that the strategy computes the logits and the gradients of the plain net.

        All ranks must call this method, before the net of the run is built. It changes the state of
        the random generators. If the plain net can be run neither in float64 nor in the dtype in
        which it is built, nothing is compared; a partitioning strategy then logs a warning with the
        reason. Sets `parallel.forward_only` if the loss must be computed from `forward`, and
        `parallel.may_pad` to False if padding changes the outputs of the net.

        Args:
            sample: Tokens (T,) of one sample of the data, int64. Rank 0's sample is used on all
                ranks.

        Raises:
            IncompatibleModelError: If the nets differ, or if the partitioned net fails. Errors of
                torch about memory or communication are passed on.
        """
        tokens, targets = make_batch(from_rank_0(sample), self.parallel)
        reason = ""
        for dtype in TOLERANCES:
            with default_dtype(dtype):
                plain = None
                found = ("", "", "")
                try:
                    found = (*self.compare_in_training(dtype, tokens, targets), "")
                    plain = self.run_plain(dtype, tokens, targets)
                except Exception as error:  # a user's net can raise anything
                    found = (*found[:2], first_cause(error))
                of_ranks = zip(*gather(found), strict=True)
                parts, recomputed, reason = (next(filter(None, texts), "") for texts in of_ranks)
                if parts and not self.parallel.forward_only:
                    self.parallel.forward_only = True
                    if not self.parallel.is_pipeline:
                        message = "warning: the loss is computed from the logits of forward"
                        log.warning("%s, which takes more memory: %s", message, parts)
                if plain is not None and not reason:
                    self.check_partitioned(plain, dtype, tokens, targets)
                    self.parallel.may_pad = self.is_same_with_padding(dtype, tokens, targets)
                if parts and self.parallel.is_pipeline:
                    message = f"would train another function than this net: {parts}"
                    raise IncompatibleModelError(self.key, f"{message}; {self.contract}")
                if recomputed:
                    raise IncompatibleModelError("model.activation_checkpointing", recomputed)
                if not reason:
                    return
        if self.parallel.is_partitioned:
            message = "the partitioned net was not compared with the plain net"
            log.warning("warning: %s: %s", message, reason)

    def compare_in_training(
        self, dtype: torch.dtype, tokens: Tensor, targets: Tensor
    ) -> tuple[str, str]:
        """Compare forward of the plain net with its parts, and with blocks that recompute.

        There is no communication.

        Args:
            dtype: Type of the weights and of the computation.
            tokens: Token ids (B, T).
            targets: Next tokens (B, T).

        Returns:
            How the parts from which the strategy computes the loss differ from `forward` in
            training, and how a net with the activation checkpointing of the run differs from one
            without. Each is an empty string if there is no difference.

        Raises:
            Exception: Any exception of `forward`, or IncomparableError without enough memory.
        """
        parallel = self.parallel
        net = build_on_meta_device(self.make_net)
        calls_parts = parallel.is_pipeline or supports_chunked_loss(net)
        if not calls_parts and self.checkpoint is None:
            return "", ""
        expected = self.run_training(dtype, net_logits, tokens, targets)

        def difference(*arguments: Any) -> str:
            """Return how a run in training differs from that of `forward`."""
            try:
                result = self.run_training(dtype, *arguments)
            except Exception as error:  # a user's net can raise anything
                return first_cause(error)
            if result[1] != expected[1]:
                return "other random numbers are drawn"
            tolerance = TOLERANCES[dtype]
            bounds = {
                "rtol": tolerance,
                "atol": tolerance * 1e-2 * expected[0].nan_to_num().max().item(),
            }
            is_same = torch.allclose(result[0], expected[0], **bounds, equal_nan=True)
            return "" if is_same else "loss or gradients differ"

        parts = recomputed = ""
        if calls_parts and (text := difference(parallel.logits_of_parts, tokens, targets)):
            parts = f"in training the parts of the net do not compute what forward does: {text}"
        if self.checkpoint is not None:
            text = difference(net_logits, tokens, targets, self.checkpoint)
            recomputed = (
                text and f"blocks that run twice do not train as blocks that run once: {text}"
            )
        return parts, recomputed

    def run_training(
        self,
        dtype: torch.dtype,
        compute_logits: Callable[..., Tensor],
        tokens: Tensor,
        targets: Tensor,
        change: Callable[[nn.Module], None] | None = None,
    ) -> tuple[Tensor, list[float]]:
        """Run a plain net forward and backward, in training mode and with a fixed seed.

        There is no communication.

        Args:
            dtype: Type of the weights and of the computation.
            compute_logits: Function (net, tokens, targets) that returns logits (B, T, V).
            tokens: Token ids (B, T).
            targets: Next tokens (B, T).
            change: Function that changes the net in place before it runs.

        Returns:
            Loss and norms of the gradients of all parameters, on the CPU, and the next numbers of
            the random generators.
        """
        net = self.build_plain(dtype).train()
        if change is not None:
            change(net)
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(0)
        logits = compute_logits(net, tokens, targets)
        loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
        if loss.requires_grad:
            loss.backward()
        norms = [0.0 if p.grad is None else float(p.grad.norm()) for p in net.parameters()]
        draws = [torch.rand((), device=device).item() for device in ("cpu", self.parallel.device)]
        draws += [random.random(), numpy.random.rand()]
        return torch.tensor([loss.item(), *norms]), draws

    def build_plain(self, dtype: torch.dtype) -> nn.Module:
        """Build the plain net with noisy weights on the device of this rank, in evaluation mode.

        Args:
            dtype: Type of the weights and of the computation.

        Raises:
            IncomparableError: If the free memory is too small.
        """
        device = self.parallel.device

        def prepare_plain(net: nn.Module) -> None:
            prepare_net(net, self.parallel, dtype)
            needed_bytes = BYTES_PER_PARAMETER * count_parameters(net)
            available_bytes = free_bytes(device)
            if needed_bytes > available_bytes:
                raise IncomparableError(
                    f"the comparison takes {needed_bytes / 2**30:.1f} GiB, and "
                    f"{available_bytes / 2**30:.1f} GiB are free"
                )

        net = make_net_on(device, self.make_net, prepare_plain)
        add_noise(net, tied_names(net), device)
        return net

    def is_same_with_padding(self, dtype: torch.dtype, tokens: Tensor, targets: Tensor) -> bool:
        """Return whether the partitioned net is also right for sequences that it has to pad.

        All ranks must call this method. It returns True without a comparison if the strategy pads
        no sequences, or has padded these tokens already.

        Args:
            dtype: Type of the weights and of the computation.
            tokens: Token ids (B, T).
            targets: Next tokens (B, T).
        """
        group = self.parallel.activation_group
        if group is None or group.size() == 1 or tokens.shape[1] % group.size():
            return True
        tokens, targets = tokens[:, 1:], targets[:, 1:]
        plain = None
        with suppress(Exception):  # for example a net that takes one length only
            plain = self.run_plain(dtype, tokens, targets)
        if not all(gather(plain is not None)) or plain is None:
            return False
        try:
            self.check_partitioned(plain, dtype, tokens, targets)
        except IncompatibleModelError:
            return False
        return True

    def run_plain(self, dtype: torch.dtype, tokens: Tensor, targets: Tensor) -> PlainResult:
        """Build the plain net with noisy weights, and run its forward and its backward pass.

        There is no communication. The net is discarded afterwards.

        Args:
            dtype: Type of the weights and of the computation.
            tokens: Token ids (B, T).
            targets: Next tokens (B, T).

        Raises:
            IncomparableError: If the free memory is too small, if the logits of a sample depend on
                the other samples or on chance, or if the logits are not finite. An exception of the
                net itself is passed on.
            IncompatibleModelError: If `forward` does not return logits (B, T, V).
        """
        net = self.build_plain(dtype)
        first_names = tied_names(net)
        with torch.no_grad():
            logits = net_logits(net, tokens, tokens)
        # Run the same samples in batches of other sizes, to measure how much the batch size changes
        # the logits.
        split_logits = torch.cat([net(tokens[:1]), net(tokens[1:])])
        if not torch.isfinite(logits).all():
            raise IncomparableError("the logits of the plain net are not finite")
        own_error = relative_difference(split_logits, logits)
        if own_error > TOLERANCES[torch.float32]:
            raise IncomparableError(
                "in evaluation mode the logits of the plain net are random, or depend on the other "
                "samples of a batch"
            )
        gradients = {}
        if split_logits.requires_grad:
            F.cross_entropy(split_logits.flatten(0, -2), targets.flatten()).backward()
            gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        return PlainResult(
            logits=logits.flatten(0, -2),
            gradients=gradients,
            first_names=first_names,
            tolerance=max(TOLERANCES[dtype], 10 * own_error),
        )

    def check_partitioned(
        self, plain: PlainResult, dtype: torch.dtype, tokens: Tensor, targets: Tensor
    ) -> None:
        """Run the partitioned net, and compare its logits and gradients with those of `plain`.

        All ranks must call this method.

        Args:
            plain: Result of `run_plain`.
            dtype: Type of the weights and of the computation.
            tokens: Token ids (B, T).
            targets: Next tokens (B, T).

        Raises:
            IncompatibleModelError: If the nets differ, or if the partitioned net fails. Errors of
                torch about memory or communication are passed on.
        """
        parallel = copy(self.parallel)
        parallel.precision = "32-true"  # FSDP then keeps the dtype of the comparison

        def prepare_and_partition(net: nn.Module) -> None:
            prepare_net(net, self.parallel, dtype)
            self.partition(net, parallel)

        try:
            net = cast(Net, make_net_on(self.weights_device, self.make_net, prepare_and_partition))
            add_noise(net, plain.first_names, self.parallel.device)
            chunks = [logits for logits, _ in parallel.logits(net, tokens, targets)]
            differences = gather(compare_logits(plain, chunks))
            if not any(differences) and plain.gradients:
                parallel.mean_loss(net, tokens, targets, PLAIN_CROSS_ENTROPY).backward()
                parallel.finish_gradients()
                differences = gather(compare_gradients(plain, net))
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:  # a user's net can raise anything
            message = f"cannot run this net: {first_cause(error)}; {self.contract}"
            raise IncompatibleModelError(self.key, message) from error
        differences = list(filter(None, differences))
        if differences:
            _, description = min(differences)
            message = f"would train another function than this net: {description}; {self.contract}"
            raise IncompatibleModelError(self.key, message)


def make_batch(sample: Tensor, parallel: ParallelStrategy) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (B, T) for a comparison, made from one sample.

    No second sample is read, because reading may advance the random generators of a dataset. The
    rows of the batch are the beginnings of rotated copies of the sample. T is at most N_TOKENS +
    world size. T and the length of the sample leave the same remainder when divided by the world
    size, so that the strategy pads this batch if it would pad the sample.

    Args:
        sample: Tokens of one sample, (T,).
        parallel: Strategy of the run.
    """
    n_tokens, world_size = len(sample), parallel.dims.world_size
    if n_tokens > N_TOKENS + world_size:
        n_tokens = N_TOKENS + (n_tokens - N_TOKENS) % world_size
    n_rows = max(2, parallel.microbatches)
    rows = [sample.roll(-row * n_tokens - row)[:n_tokens] for row in range(n_rows)]
    tokens = torch.stack(rows).to(parallel.device, torch.int64)
    return tokens, tokens.roll(-1, 1)


def prepare_net(net: nn.Module, parallel: ParallelStrategy, dtype: torch.dtype) -> None:
    """Prepare a full net for the comparison, in place, before it is partitioned.

    Sets evaluation mode and the dtype. A net with more than MAX_PARAMETERS parameters keeps only as
    many blocks as a pipeline has stages, and at least 2.

    Args:
        net: Full net.
        parallel: Strategy of the run.
        dtype: torch.float64 converts the net. Any other type leaves it unchanged.
    """
    blocks = net._modules.get("blocks")
    if count_parameters(net) > MAX_PARAMETERS and isinstance(blocks, nn.ModuleList):
        net.blocks = blocks[: max(2, parallel.n_stages)]
    net.eval()
    if dtype == torch.float64:
        net.double()  # unlike .to(), double() keeps complex buffers


def count_parameters(net: nn.Module) -> int:
    """Return the number of values in all parameters of a net; tied parameters count once."""
    return sum(parameter.numel() for parameter in net.parameters())


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes that a comparison may use on this rank's device.

    A comparison may use half of the free memory of a GPU. On another device the ranks of a node
    share half of the installed host memory, whether or not it is in use.

    Args:
        device: Device of this rank.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@torch.no_grad()
def add_noise(net: nn.Module, first_names: Mapping[str, str], device: torch.device) -> None:
    """Add noise to all parameters, because weights of zero would hide differences between two nets.

    Of a sharded parameter only this rank's shard changes. Integer parameters stay. The noise
    depends only on the name of the parameter, so that plain and partitioned net get the same
    values. Its standard deviation is 1 / sqrt(columns) for matrices, which keeps activations near 1
    and attention far from uniform, and 0.1 for vectors. Frozen parameters get noise, too.

    Args:
        net: Plain or partitioned net, changed in place.
        first_names: Further name of a tied parameter -> its first name in the full net.
        device: Device on which the noise is drawn.
    """
    for name, parameter in net.named_parameters():
        if not parameter.is_floating_point():
            continue
        name = first_names.get(name, name)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        generator = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        noise *= 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
        noise = shard_like(noise.to(parameter.device, parameter.dtype), parameter)
        local_shard(parameter).add_(local_shard(noise))


def first_cause(error: BaseException) -> str:
    """Return "type: message" of the first exception in a chain of causes, on one line.

    The type is left out for an IncomparableError.

    Args:
        error: Last exception of the chain, whose `__cause__` leads to the first one.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return message if isinstance(error, IncomparableError) else f"{type(error).__name__}: {message}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Set torch's default dtype inside the block, and turn TF32 off for float32 matrices.

    Args:
        dtype: Dtype of tensors that are made in the block without a dtype.
    """
    previous_dtype = torch.get_default_dtype()
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_default_dtype(previous_dtype)
        torch.set_float32_matmul_precision(previous_precision)
