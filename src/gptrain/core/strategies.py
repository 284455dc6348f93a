"""Table of the parallel strategies: options, requirements, and axes of the device mesh.

A strategy is a preset of sizes of the four axes of the mesh, with the options that they need. The
table STRATEGIES lists the combinations that are tested; its rows are the types of their options.
Nothing in this file imports torch, so that the command line and the planner can read the table.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import AfterValidator

from gptrain.core.locations import LIBRARY
from gptrain.core.value_types import Count, OpenSection, Positive, Seconds

DATA, CONTEXT, TENSOR, PIPELINE = "data", "context", "tensor", "pipeline"
_HEADS = ("tensor_plan", "n_heads", "head")


def _known(name: str) -> str:
    """Check that a value of `strategy.name` is in the table STRATEGIES or "auto"; return it."""
    if name not in (names := ("auto", *STRATEGIES)):
        raise ValueError(f"unknown; allowed: {', '.join(names)}")
    return name


class StrategyOptions(OpenSection):
    """Options that every strategy has, and facts about the strategy as attributes of the class.

    Attributes:
        axes: Axes of the device mesh over which the work is divided.
        needs: Attributes that a net must have, such as `blocks` and `head`. Without any, ranks
            train as under Lightning's own strategies: the loss scaler of fp16 works, the whole net
            can be compiled, and module and data may be any of Lightning's.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()

    name: Annotated[str, AfterValidator(_known)]
    timeout_s: Seconds
    backend: Literal["nccl", "gloo", "mpi"] | None


class SingleOptions(StrategyOptions, extra="forbid"):
    """Options of `single`: only those that every strategy has."""


class DDPOptions(StrategyOptions, extra="forbid"):
    """Options of `ddp` and `auto`: arguments of DistributedDataParallel, and `comm_hook`.

    `comm_hook` names the hook that is registered by `register_comm_hook`.
    """

    axes = (DATA,)

    bucket_cap_mb: Positive
    gradient_as_bucket_view: bool
    static_graph: bool
    find_unused_parameters: bool
    comm_hook: Literal["none", "bf16", "fp16", "powersgd"]


class ShardedOptions(StrategyOptions, extra="forbid"):
    """Options of every strategy that shards weights with FSDP2."""

    reshard_after_forward: bool
    accumulate_shards: bool
    cpu_offload: bool
    find_unused_parameters: bool


class FSDPOptions(ShardedOptions):
    """Options of `fsdp`."""

    axes = (DATA,)
    needs = ("blocks",)

    replicas: Count


class TensorParallelOptions(StrategyOptions, extra="forbid"):
    """Options of `tensor_parallel`."""

    axes = (TENSOR,)
    needs = _HEADS

    tensor_parallel_size: Count | None


class FSDPTensorParallelOptions(ShardedOptions, TensorParallelOptions):
    """Options of `fsdp_tensor_parallel`: those of FSDP2, and `tensor_parallel_size`."""

    axes = (DATA, TENSOR)
    needs = ("blocks", *_HEADS)


class ContextParallelOptions(ShardedOptions):
    """Options of `context_parallel`."""

    axes = (DATA, CONTEXT)
    needs = ("blocks", "context_plan", "n_heads")

    context_parallel_size: Count | None


class PipelineOptions(StrategyOptions, extra="forbid"):
    """Options of `pipeline`."""

    axes = (PIPELINE,)
    needs = ("embed", "blocks", "norm", "head")

    pipeline_parallel_size: Count | None
    microbatches: Count | None
    schedule: Literal["gpipe", "1f1b"]


class DDPPipelineOptions(PipelineOptions):
    """Options of `ddp_pipeline`: those of `pipeline`."""

    axes = (DATA, PIPELINE)


STRATEGIES: dict[str, type[StrategyOptions]] = {
    "single": SingleOptions,
    "ddp": DDPOptions,
    "fsdp": FSDPOptions,
    "tensor_parallel": TensorParallelOptions,
    "fsdp_tensor_parallel": FSDPTensorParallelOptions,
    "context_parallel": ContextParallelOptions,
    "pipeline": PipelineOptions,
    "ddp_pipeline": DDPPipelineOptions,
}
ANY_NET = tuple(name for name, options in STRATEGIES.items() if not options.needs)


@cache
def default_options(name: str) -> StrategyOptions:
    """Return the options of a strategy with the defaults of its yaml file.

    `name` is a key of STRATEGIES or "auto". The caller must not change the result, which all calls
    with the same name share.
    """
    content = yaml.safe_load((LIBRARY / "conf" / "strategy" / f"{name}.yaml").read_text())
    return STRATEGIES["ddp" if name == "auto" else name].model_validate(content)


def options_for(name: str, given: StrategyOptions) -> StrategyOptions:
    """Return the default options of a strategy, with the values of `given` for keys that both have.

    Args:
        name: Key of STRATEGIES.
        given: Options of any strategy. Its `name` is not taken over.
    """
    shared = STRATEGIES[name].model_fields.keys() & given.model_fields_set - {"name"}
    return default_options(name).model_copy(update={key: getattr(given, key) for key in shared})


@dataclass(frozen=True)
class ParallelDims:
    """Number of ranks along each axis of the device mesh, pipeline x data x context x tensor.

    Ranks are numbered along the last axis first: rank 1 follows rank 0 in `tensor`, if that is
    more than 1.

    Attributes:
        data: Groups of ranks that train on different samples.
        tensor: Ranks that share each layer.
        pipeline: Ranks that share the blocks, each of which has one stage.
        replicas: Copies of a net that FSDP shards. It is no further axis, and divides `data`.
        context: Ranks that share each sequence.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks that average their gradients: those of the data and context axes."""
        return self.data * self.context

    def data_rank(self, rank: int) -> int:
        """Return which part of the samples a rank reads, from 0 to `data` - 1."""
        return rank // (self.context * self.tensor) % self.data


def strategy_name(name: str, world_size: int) -> str:
    """Return the key of STRATEGIES for a `strategy.name`: the name itself, unless it is "auto".

    "auto" stands for `single` on one rank, else for `ddp`.
    """
    if name == "auto":
        return "single" if world_size == 1 else "ddp"
    return name


def parallel_dims(options: StrategyOptions, world_size: int, n_nodes: int = 1) -> ParallelDims:
    """Return the number of ranks along each axis of the strategy `options.name`.

    The data axis has the ranks that the others leave. A context axis whose size is null has all
    ranks of a node. A tensor or pipeline axis whose size is null has 2 ranks if the strategy has a
    data axis, else all. `replicas` is taken over without a check.

    Args:
        n_nodes: Number of nodes, which have equally many ranks.

    Raises:
        ValueError: If the sizes do not multiply to the world size.
    """
    name = strategy_name(options.name, world_size)
    axes = STRATEGIES[name].axes
    default = 2 if DATA in axes else world_size
    defaults = {CONTEXT: max(1, world_size // n_nodes), TENSOR: default, PIPELINE: default}
    others = [axis for axis in axes if axis != DATA]
    sizes = {axis: getattr(options, f"{axis}_parallel_size") or defaults[axis] for axis in others}
    n_data = max(1, world_size // math.prod(sizes.values())) if DATA in axes else 1
    dims = ParallelDims(n_data, replicas=getattr(options, "replicas", 1), **sizes)
    if dims.world_size != world_size:
        equation = " x ".join(f"{axis} {getattr(dims, axis)}" for axis in axes or (DATA,))
        raise ValueError(
            f"strategy={name}: {equation} = {dims.world_size}, but there are {world_size} ranks"
        )
    return dims


def count_microbatches(given: int | None, n_ranks: int) -> int:
    """Return the number of microbatches of a micro-step: `given`, or 2 per rank of the pipeline.

    `given` is the option `strategy.microbatches`, and `n_ranks` the number of pipeline ranks.
    """
    return given or 2 * n_ranks


def stage_blocks(stage: int, n_stages: int, n_blocks: int) -> range:
    """Return the indices of the blocks of a pipeline stage.

    If the stages cannot hold equally many, the first one and some others hold one block more than
    the last one. With fewer blocks than stages, some stages have none.

    Args:
        stage: Index of the stage, from 0.
    """
    # The last stage also computes the head, which costs more than the embedding.
    return range(*(-(-n_blocks * i // n_stages) for i in (stage, stage + 1)))
