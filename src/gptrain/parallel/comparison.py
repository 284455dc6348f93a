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

The comparison does not depend on the strategy: it calls `ParallelStrategy.logits` and
`ParallelStrategy.mean_loss`, so that every new strategy is compared, too.
"""

# B batch, T time

import hashlib
import logging
import math
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gptrain.loss import PLAIN_CROSS_ENTROPY
from gptrain.parallel.differences import (
    ForwardRecord,
    PlainResult,
    compare_forward,
    compare_gradients,
    recording,
    relative_difference,
)
from gptrain.parallel.mesh import from_rank_0, gather
from gptrain.parallel.placement import local_shard, make_net_on, shard_like
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
    `forward`, `embed` or `hidden` that was replaced on the object does not count as unchanged.
    `gptrain.models.hugging_face.HuggingFace` always counts as unchanged, because that class checks
    its model itself.
    """
    if type(net).__module__ == "gptrain.models.hugging_face":
        return True  # HuggingFace checks by itself which parts of the contract its model fulfils
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
    """

    make_net: Callable[[], nn.Module]
    partition: Callable[[nn.Module, ParallelStrategy], None]
    parallel: ParallelStrategy
    weights_device: torch.device | str
    key: str
    contract: str

    def check(self, sample: Tensor) -> None:
        """Check that the strategy computes the logits and the gradients of the plain net.

        All ranks must call this method, before the net of the run is built. It changes the state of
        the random generators. If the plain net can be run neither in float64 nor in the dtype in
        which it is built, nothing is compared; a partitioning strategy then logs a warning with the
        reason.

        Args:
            sample: Tokens (T,) of one sample of the data, int64. Rank 0's sample is used on all
                ranks.

        Raises:
            IncompatibleModelError: If the nets differ, or if the partitioned net fails. The message
                names the first module that differs. Errors of torch about memory or communication
                are passed on if the partitioned net raises them.
        """
        batch = make_batch(from_rank_0(sample), self.parallel)
        reason = ""
        for dtype in TOLERANCES:
            with default_dtype(dtype):
                plain = None
                reason = ""
                try:
                    plain = self.run_plain(dtype, *batch)
                except Exception as error:  # a user's net can raise anything
                    reason = first_cause(error)
                reason = next(filter(None, gather(reason)), "")
                if plain is not None and not reason:
                    self.check_partitioned(plain, dtype, *batch)
                    return
        if self.parallel.is_partitioned:
            message = "the partitioned net was not compared with the plain net"
            log.warning("warning: %s: %s", message, reason)

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
        record = ForwardRecord()
        first_names = tied_names(net)
        add_noise(net, first_names, device)
        with torch.no_grad(), recording(net, record):
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
            record=record,
            gradients=gradients,
            first_names=first_names,
            classes={name: type(part) for name, part in net.named_modules()},
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
        record = ForwardRecord()

        def prepare_and_partition(net: nn.Module) -> None:
            prepare_net(net, self.parallel, dtype)
            self.partition(net, parallel)

        try:
            net = cast(Net, make_net_on(self.weights_device, self.make_net, prepare_and_partition))
            add_noise(net, plain.first_names, self.parallel.device)
            with recording(net, record):
                chunks = [logits for logits, _ in parallel.logits(net, tokens, targets)]
            differences = gather(compare_forward(plain, record, chunks, parallel.activation_group))
            if not any(differences) and plain.gradients:
                parallel.mean_loss(net, tokens, targets, PLAIN_CROSS_ENTROPY).backward()
                parallel.finish_gradients()
                differences = gather(compare_gradients(plain, net))
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:  # a user's net can raise anything
            where = f" in {record.pending[-1]}" if record.pending else ""
            message = f"cannot run this net{where}: {first_cause(error)}; {self.contract}"
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
