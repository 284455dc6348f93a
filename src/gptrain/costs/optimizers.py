"""Facts about optimizers that the planner asks for: stored state, extra work and extra traffic.

Nothing here imports torch. KNOWN has the facts of the optimizers of torch and of gptrain. Any other
class states its own facts in a static method, and no other file must know about it:

    class SignSGD(torch.optim.Optimizer):
        @staticmethod
        def facts(options: Mapping[str, Any]) -> OptimizerFacts:
            return OptimizerFacts(states_per_parameter=1 if options.get("momentum") else 0)

A class that states nothing counts as two stored values per parameter, as Adam has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from gptrain.core.strategies import DATA, TENSOR
from gptrain.costs.communication import Traffic, gather_bytes

if TYPE_CHECKING:
    from gptrain.costs.shape import DecoderShape
    from gptrain.costs.work import Work

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class OptimizerFacts:
    """Memory, FLOPs and traffic of an optimizer's update, for the planner.

    The elementwise work of an update is part of the planner's cost per parameter. An optimizer
    whose update multiplies matrices or communicates overrides `flops` and `traffic`.

    Attributes:
        states_per_parameter: Values that are stored per parameter; the maximum, if it varies.
        value_bytes: Bytes of a stored value. None if it has the type of the parameter.
    """

    states_per_parameter: float = 2
    value_bytes: int | None = None

    def bytes_per_parameter(self, weight_bytes: int) -> float:
        """Return the bytes of optimizer state per parameter.

        Args:
            weight_bytes: Bytes of a parameter. A stored value has as many if `value_bytes` is None.
        """
        return self.states_per_parameter * (self.value_bytes or weight_bytes)

    def state_bytes(self, work: Work) -> float:
        """Return the bytes of state for the parameters of a rank, before FSDP shards them.

        Args:
            work: Facts about the rank's optimizer step.
        """
        return sum(work.held) * self.bytes_per_parameter(work.weight_bytes)

    def flops(self, work: Work) -> float:
        """Return the FLOPs of a rank's update in addition to its elementwise work: here 0.

        Args:
            work: Facts about the rank's optimizer step.
        """
        return 0.0

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield what a rank sends for its update, in addition to the gradients: here nothing.

        Args:
            work: Facts about the rank's optimizer step.
        """
        yield from ()


@dataclass(frozen=True)
class MuonFacts(OptimizerFacts):
    """Facts about Muon, which updates hidden matrices, with AdamW for all other parameters.

    Muon stores one value per weight of a hidden matrix, AdamW two values per parameter.
    """

    def state_bytes(self, work: Work) -> float:
        """Return the bytes of state for the parameters of a rank, before FSDP shards them.

        Muon stores one value per weight of a hidden matrix, AdamW two for each other parameter.

        Args:
            work: Facts about the rank's optimizer step.
        """
        n_hidden = work.part[0] * work.shape.block_matrices / work.dims.tensor
        return super().state_bytes(work) - n_hidden * work.weight_bytes

    def flops(self, work: Work) -> float:
        """Return the FLOPs of the Newton-Schulz steps of the matrices that the rank updates.

        Args:
            work: Facts about the rank's optimizer step.
        """
        return muon_flops(work.shape, work.part[0], ranks_of_update(work))

    def traffic(self, work: Work) -> Iterator[Traffic]:
        """Yield the traffic of the updates of hidden matrices, which the ranks divide.

        Updates are sent in bf16, or in fp32 by a device without bf16 instructions. Ranks that hold
        full matrices all-gather the updates. Shards are sent to the rank that updates their matrix,
        and the updates are sent back. With NCCL each rank gets only the values that it needs. Gloo
        cannot do that, and all-gathers full matrices both times. Ranks that hold copies of the same
        shards (HSDP) send nothing to each other before the update, and all-gather the updated
        shards afterwards.

        Args:
            work: Facts about the rank's optimizer step.
        """
        dims = work.dims
        n_ranks = ranks_of_update(work)
        is_sharded = work.costs.shards_weights or dims.tensor > 1
        value_bytes = 2 if work.has_bf16 else 4
        parts = update_parts(work.shape, work.part[0], n_ranks)
        # Number of weights that one rank updates
        n_values = sum(short * long * number for short, long, number in parts)
        updates = value_bytes * n_ranks * n_values
        if is_sharded:
            matrices = value_bytes * work.part[0] * work.shape.block_matrices
            copy_ranks = n_ranks // dims.replicas  # ranks that hold the shards of one copy
            if work.is_cpu:
                sent = gather_bytes(matrices, copy_ranks) + gather_bytes(updates, n_ranks)
            else:
                sent = gather_bytes(matrices + updates, copy_ranks) / n_ranks
                sent += gather_bytes(updates / copy_ranks, dims.replicas)
        else:
            sent = gather_bytes(updates, n_ranks)
        n_shapes = len(parts)  # all matrices of one shape take one collective
        if dims.tensor > 1:
            n_shapes += 1  # the shards of out_proj have a shape of their own
        calls = 2 * n_shapes if is_sharded else n_shapes
        axis = DATA if dims.gradient_ranks > 1 else TENSOR
        yield Traffic("updates of Muon", axis, sent, calls, n_ranks - 1)


def ranks_of_update(work: Work) -> int:
    """Return how many ranks divide the updates of the hidden matrices of a rank's blocks.

    Under FSDP these are all ranks of the mesh: ranks that hold copies of the same shards divide the
    updates, too. Without FSDP they are the ranks of a tensor group or, without tensor parallelism,
    the ranks that average their gradients.

    Args:
        work: Facts about the rank's optimizer step.
    """
    if work.costs.shards_weights:
        return work.dims.tensor * work.dims.gradient_ranks
    return work.dims.tensor if work.dims.tensor > 1 else work.costs.step_ranks


def update_parts(shape: DecoderShape, n_blocks: int, n_ranks: int) -> list[tuple[int, int, int]]:
    """Return (shorter side, longer side, number) for each shape of matrices that a rank updates.

    The ranks divide the matrices of one shape. The number of a rank is rounded up.

    Args:
        shape: Shape of the net, with the matrices of one block.
        n_blocks: Number of blocks whose matrices the ranks update together.
        n_ranks: Number of ranks that divide the matrices.
    """
    counts = Counter(shape.matrices).items()
    return [
        (min(sides), max(sides), math.ceil(n_blocks * number / n_ranks)) for sides, number in counts
    ]


def muon_flops(shape: DecoderShape, n_blocks: int, n_ranks: int) -> int:
    """Return the FLOPs of the Newton-Schulz steps in a rank's updates.

    A step of a matrix X (s, l) with s <= l has the products X X^T, (X X^T)(X X^T) and one of an (s,
    s) matrix with X: 2 s^2 l + 2 s^3 + 2 s^2 l FLOPs.

    Args:
        shape: Shape of the net, with the matrices of one block.
        n_blocks: Number of blocks whose matrices the ranks update together.
        n_ranks: Number of ranks that divide the matrices.
    """
    return sum(
        number * NEWTON_SCHULZ_STEPS * short**2 * (4 * long + 2 * short)
        for short, long, number in update_parts(shape, n_blocks, n_ranks)
    )


ADAM = OptimizerFacts()


def _n_states(n_states: int) -> Callable[[Mapping[str, Any]], OptimizerFacts]:
    """Return an entry of KNOWN for an optimizer that stores `n_states` values per parameter.

    Args:
        n_states: Number of stored values per parameter, whatever the options are.
    """
    return lambda options: OptimizerFacts(n_states)


KNOWN: dict[str, Callable[[Mapping[str, Any]], OptimizerFacts]] = {
    "torch.optim.SGD": lambda options: OptimizerFacts(1 if options.get("momentum") else 0),
    # Adafactor stores only one row and one column per matrix.
    "torch.optim.Adafactor": _n_states(0),
    "torch.optim.RMSprop": _n_states(1),
    "torch.optim.Adagrad": _n_states(1),
    "torch.optim.ASGD": _n_states(1),
    "gptrain.optim.Muon": lambda options: MuonFacts(),
}


def facts_of(target: str, options: Mapping[str, Any]) -> OptimizerFacts:
    """Return what the planner has to know about an optimizer: its state, FLOPs and traffic.

    The facts are those in KNOWN. A class outside of torch that is not there is imported, and its
    static method `facts` is called with the options. A class without this method counts as its
    nearest base class in KNOWN. Any other class, and a class that cannot be imported, counts as
    Adam: the check of a run reports the import error.

    Args:
        target: The `_target_` of the optimizer group.
        options: Keyword arguments of the optimizer.

    Raises:
        Exception: Whatever the method `facts` of a user's class raises.
    """
    if known := KNOWN.get(_public_name(target)):
        return known(options)
    if target.startswith("torch.optim."):
        return ADAM
    try:
        optimizer = resolve_name(target)
    except Exception:
        return ADAM
    if states_facts := getattr(optimizer, "facts", None):
        return states_facts(options)
    for base in getattr(optimizer, "__mro__", ()):  # the base classes of a class
        if known := KNOWN.get(_public_name(f"{base.__module__}.{base.__qualname__}")):
            return known(options)
    return ADAM


def _public_name(path: str) -> str:
    """Return the path by which a class is exported: torch.optim.sgd.SGD -> torch.optim.SGD.

    This is the name of the class after the first two packages of its path, as KNOWN has it.
    """
    parts = path.split(".")
    return ".".join([*parts[:-1][:2], parts[-1]])
