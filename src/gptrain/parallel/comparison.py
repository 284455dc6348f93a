"""Compares a net as a strategy runs it with the plain net, once, before the first step.

A strategy partitions a net under assumptions that `gptrain.models` states: head counts are read off
the width, forward is the chain of its parts, and so on. A net that breaks one of them would train
another function without a word. So both forms of the net get the same weights and the same small
batch, and their logits and gradients are compared.

- The weights are the initial ones plus noise, so that a head or a projection that starts with zeros
  hides nothing. Both forms are thrown away afterwards: no weight of the run is touched.
- Both are in evaluation mode and in float64, where rounding cannot be mistaken for a difference. A
  net that works in no other type than its own is compared in that type, with a wider tolerance.
- Both are made on the device of the rank. A rank holds the plain net and its gradients for a
  moment, 16 bytes per parameter. Of a net with more than `MAX_PARAMETERS` only the first blocks are
  compared: as many as a pipeline has stages, and 2 at least. A difference in later blocks alone is
  not seen then. Where even these do not fit, nothing is compared, and one line says so.
- `model.compile` is left out: compiled code of the comparison would fill the compiler's cache.

The comparison knows no strategy: it asks `ParallelStrategy` for logits and for a loss. A strategy
that
partitions the sequence, or anything else, is compared by the same call.
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

from gptrain.loss import PLAIN
from gptrain.parallel.differences import (
    Plain,
    Record,
    compare_forward,
    compare_gradients,
    difference,
    gather,
    recording,
)
from gptrain.parallel.mesh import from_rank_0
from gptrain.parallel.placement import local_shard, make_net_on, shard_like
from gptrain.parallel.requirements import IncompatibleModelError, Net, tied_names
from gptrain.parallel.strategy import ParallelStrategy, supports_chunked_loss

log = logging.getLogger(__name__)

MAX_PARAMETERS = 2**27  # GPT-2's 124 M and less are compared with all of their blocks
BYTES_PER_PARAMETER = 16  # weights and gradients of the plain net, or the weights of both, in fp64
N_TOKENS = 32  # positions of a sample, and up to a world size more
# Largest difference, as a fraction of the largest value. Parts of a net that compute in float32
# whatever they are given leave about 1e-6 in the first. Ten times the difference that another
# batch size makes to the plain net is allowed in any case.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-2}
LIBRARIES = ("gptrain.models.", "torch.nn.")


class IncomparableError(Exception):
    """The plain net cannot be run for a comparison; the message is the reason."""


def needs_comparison(
    net: nn.Module, parallel: ParallelStrategy, activation_checkpointing: str
) -> bool:
    """Return whether this net could compute something else once the strategy has taken it.

    The library's own classes are tested against one process. A net of any other class, a subclass
    of ours included, is compared if it is partitioned, if its loss is taken from `hidden` and
    `head` in place of `forward`, or if its blocks run twice.
    """
    changes = (
        parallel.is_partitioned or supports_chunked_loss(net) or activation_checkpointing != "none"
    )
    return changes and not is_of_library(net)


def is_of_library(net: nn.Module) -> bool:
    """Return whether a net and all of its modules are classes of gptrain.models and of torch.nn."""
    if type(net).__module__ == "gptrain.models.hugging_face":
        return True  # it asks its model of transformers which parts of the contract hold
    if not type(net).__module__.startswith("gptrain.models.") or "hidden" in vars(net):
        return False
    return all(
        f"{type(part).__module__}.".startswith(LIBRARIES)
        and not type(part).__module__.startswith("torch.nn.utils.")  # parametrizations
        and not {"forward", "embed"} & vars(part).keys()
        and not part._forward_hooks
        and not part._forward_pre_hooks
        for part in net.modules()
    )


@dataclass(frozen=True)
class Comparison:
    """A net as a strategy runs it, and the plain net.

    Attributes:
        make_net: Makes the net with the same initial weights at every call.
        partition: Changes a net in place into what this rank runs.
        parallel: The strategy. A copy of it is used, which shares its groups of ranks.
        place: Device of the weights of the partitioned net.
        key: Key of the config that an error names.
        contract: What the strategy asks of a net, for the message.
    """

    make_net: Callable[[], nn.Module]
    partition: Callable[[nn.Module, ParallelStrategy], None]
    parallel: ParallelStrategy
    place: torch.device | str
    key: str
    contract: str

    def check(self, sample: Tensor) -> None:
        """Check that the strategy computes the logits and the gradients of the plain net.

        All ranks must call it, before the net of the run is made. The random generators are left
        in another state.

        Args:
            sample: Tokens of one sample of the data, (T,) int64. Rank 0's are used.

        Raises:
            IncompatibleModelError: If the two differ, or the partitioned net fails. It names the
            module that
                differs first.
        """
        batch, reason = make_batch(from_rank_0(sample), self.parallel), ""
        for dtype in TOLERANCES:
            with default_dtype(dtype):
                plain, reason = None, ""
                try:
                    plain = self.run_plain(dtype, *batch)
                except Exception as error:  # whatever a user's net raises
                    reason = first_cause(error)
                reason = next(filter(None, gather(reason)), "")
                if plain is not None and not reason:
                    self.check_partitioned(plain, dtype, *batch)
                    return
        if self.parallel.is_partitioned:
            log.warning(
                "warning: the partitioned net is not compared with the plain one: %s", reason
            )

    def run_plain(self, dtype: torch.dtype, tokens: Tensor, targets: Tensor) -> Plain:
        """Run the plain net forward and backward.

        Raises:
            IncomparableError: If the net is too large, if its logits depend on anything but the
                tokens of their sample, or if they are not finite.
        """
        device = self.parallel.device

        def prepare_plain(net: nn.Module) -> None:
            prepare(net, self.parallel, dtype)
            n_bytes, free = BYTES_PER_PARAMETER * count_parameters(net), free_bytes(device)
            if n_bytes > free:
                needs = f"it takes {n_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
                raise IncomparableError(needs)

        net, record = make_net_on(device, self.make_net, prepare_plain), Record()
        second_names = tied_names(net)
        add_noise(net, second_names, device)
        with torch.no_grad(), recording(net, record):
            logits = net(tokens)
        again = torch.cat([net(tokens[:1]), net(tokens[1:])])
        if not torch.isfinite(logits).all():
            raise IncomparableError("the logits of the plain net are not finite")
        own_error = difference(again, logits)
        if own_error > TOLERANCES[torch.float32]:
            chance = "in evaluation mode depend on chance, or on the other samples of a batch"
            raise IncomparableError(f"the logits of the plain net {chance}")
        gradients = {}
        if again.requires_grad:
            F.cross_entropy(again.flatten(0, -2), targets.flatten()).backward()
            gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        classes = {name: type(part) for name, part in net.named_modules()}
        tolerance = max(TOLERANCES[dtype], 10 * own_error)
        return Plain(logits.flatten(0, -2), record, gradients, second_names, classes, tolerance)

    def check_partitioned(
        self, plain: Plain, dtype: torch.dtype, tokens: Tensor, targets: Tensor
    ) -> None:
        """Run the partitioned net and compare it with what the plain net computed.

        Raises:
            IncompatibleModelError: As `check`.
        """
        twin, record = copy(self.parallel), Record()
        twin.precision = "32-true"  # FSDP then casts nothing

        def partition_twin(net: nn.Module) -> None:
            prepare(net, self.parallel, dtype)
            self.partition(net, twin)

        try:
            net = cast(Net, make_net_on(self.place, self.make_net, partition_twin))
            add_noise(net, plain.second_names, self.parallel.device)
            with recording(net, record):
                chunks = [logits for logits, _ in twin.logits(net, tokens, targets)]
            message = gather(compare_forward(plain, record, chunks, twin.activation_group))
            if not any(message) and plain.gradients:
                twin.mean_loss(net, tokens, targets, PLAIN).backward()
                twin.finish_gradients()
                message = gather(compare_gradients(plain, net))
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except Exception as error:  # whatever a user's net raises
            where = f" in {record.pending[-1]}" if record.pending else ""
            message = f"cannot run this net{where}: {first_cause(error)}; {self.contract}"
            raise IncompatibleModelError(self.key, message) from error
        if found := list(filter(None, message)):
            _, first = min(found)
            message = f"would train another function than this net: {first}; {self.contract}"
            raise IncompatibleModelError(self.key, message)


def make_batch(sample: Tensor, parallel: ParallelStrategy) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (B, T) for a comparison, all of them taken from one sample.

    No other sample is read, since a dataset may draw random numbers. The length leaves the same
    remainder as the sample's when ranks divide it, so that it is padded where a sample would be.
    """
    n_tokens, world_size = len(sample), parallel.dims.world_size
    if n_tokens > N_TOKENS + world_size:
        n_tokens = N_TOKENS + (n_tokens - N_TOKENS) % world_size
    n_rows = max(2, parallel.microbatches)
    rows = [sample.roll(-row * n_tokens - row)[:n_tokens] for row in range(n_rows)]
    tokens = torch.stack(rows).to(parallel.device, torch.int64)
    return tokens, tokens.roll(-1, 1)


def prepare(net: nn.Module, parallel: ParallelStrategy, dtype: torch.dtype) -> None:
    """Change a net in place for a comparison: evaluation mode, dtype, and few blocks if large."""
    blocks = net._modules.get("blocks")
    if count_parameters(net) > MAX_PARAMETERS and isinstance(blocks, nn.ModuleList):
        net.blocks = blocks[: max(2, parallel.n_stages)]
    net.eval()
    if dtype == torch.float64:
        net.double()  # not .to(): complex buffers stay what they are


def count_parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def free_bytes(device: torch.device) -> int:
    """Return how many bytes a comparison may take of the device, or of this rank's host memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // 2 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@torch.no_grad()
def add_noise(net: nn.Module, second_names: Mapping[str, str], device: torch.device) -> None:
    """Add to each parameter, or to this rank's shard of it, noise that depends on its name alone.

    Matrices get noise of 1 / sqrt(columns), which keeps activations near 1, and attention far from
    uniform; vectors get a tenth. Integer and frozen parameters are treated the same: only the
    type must be a floating one.
    """
    for name, parameter in net.named_parameters():
        if not parameter.is_floating_point():
            continue
        name = second_names.get(name, name)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        generator = torch.Generator(device).manual_seed(seed)
        whole = torch.randn(parameter.shape, generator=generator, device=device)
        whole *= 1 / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.1
        noise = shard_like(whole.to(parameter.device, parameter.dtype), parameter)
        local_shard(parameter).add_(local_shard(noise))


def first_cause(error: BaseException) -> str:
    """Return type and message of the exception that began a chain, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = " ".join(str(error).split())
    return message if isinstance(error, IncomparableError) else f"{type(error).__name__}: {message}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None, None, None]:
    """Let tensors that a forward pass makes have this type, and multiply them exactly."""
    before, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_float32_matmul_precision(precision)
