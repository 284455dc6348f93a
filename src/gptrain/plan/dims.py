"""The strategies, and how many ranks each of their axes has."""

from __future__ import annotations

from dataclasses import dataclass

DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"


@dataclass(frozen=True)
class Strategy:
    """One row of the table of strategies.

    Attributes:
        axes: over which the work is divided.
        needs: attributes that a net must have (`gptrain.models`).
        builder: `module:function` that makes this rank's net and Lightning's strategy.
    """

    axes: tuple[str, ...]
    needs: tuple[str, ...]
    builder: str


_LIT = "gptrain.lit.strategies"
_STAGES = ("embed", "blocks", "norm", "head")
_HEADS = ("tensor_plan", "n_heads", "head")
# To remove a strategy: its row here, its conf/strategy/*.yaml, its builder's file.
STRATEGIES = {
    "single": Strategy((), (), f"{_LIT}.data_parallel:build_single"),
    "ddp": Strategy((DATA,), (), f"{_LIT}.data_parallel:build_ddp"),
    "fsdp": Strategy((DATA,), ("blocks",), f"{_LIT}.partitioned:build_partitioned"),
    "tensor_parallel": Strategy((TENSOR,), _HEADS, f"{_LIT}.partitioned:build_partitioned"),
    "fsdp_tensor_parallel": Strategy(
        (DATA, TENSOR), ("blocks", *_HEADS), f"{_LIT}.partitioned:build_partitioned"
    ),
    "pipeline": Strategy((PIPELINE,), _STAGES, f"{_LIT}.pipeline:build_pipeline"),
    "ddp_pipeline": Strategy((DATA, PIPELINE), _STAGES, f"{_LIT}.pipeline:build_pipeline"),
}
AXES = {name: row.axes for name, row in STRATEGIES.items()}
ANY_NET = tuple(name for name, row in STRATEGIES.items() if not row.needs)


@dataclass(frozen=True)
class ParallelDims:
    """Ranks along each axis; their product is the world size."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline


def parallel_dims(
    name: str,
    world_size: int,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
) -> ParallelDims:
    """Ranks along each axis of a strategy on so many devices.

    What is left of the world after tensor and pipeline is data parallel. "auto" is "single" on one
    device and "ddp" on more. A size of None takes the whole world where that is the only axis, and
    2 beside data parallelism.

    Raises: ValueError with the equation if the sizes do not multiply to the world size, or a size
        is given to a strategy that has no such axis.
    """
    if name == "auto":
        name = "single" if world_size == 1 else "ddp"
    if name == "dp":
        raise ValueError(
            "strategy=dp: DataParallel runs all devices from one Python thread and copies the "
            "weights at every step, which is slower than ddp on any number of devices; use ddp"
        )
    if name not in AXES:
        raise ValueError(f"strategy={name}: not known; allowed: auto, {', '.join(AXES)}")
    given = {TENSOR: tensor_parallel_size, PIPELINE: pipeline_parallel_size}
    sizes = {}
    for axis, size in given.items():
        if axis not in AXES[name]:
            if size not in (None, 1):
                having = ", ".join(other for other, axes in AXES.items() if axis in axes)
                raise ValueError(
                    f"{axis}_parallel_size={size} has no effect under strategy={name}; "
                    f"strategies with it: {having}"
                )
            size = 1
        elif size is None:
            size = 2 if DATA in AXES[name] else world_size
        if size < 1:
            raise ValueError(f"{axis}_parallel_size={size}: at least 1")
        sizes[axis] = size
    n_data = max(1, world_size // (sizes[TENSOR] * sizes[PIPELINE])) if DATA in AXES[name] else 1
    dims = ParallelDims(n_data, sizes[TENSOR], sizes[PIPELINE])
    if dims.world_size != world_size:
        equation = f"data {n_data} x tensor {dims.tensor} x pipeline {dims.pipeline}"
        raise ValueError(
            f"strategy={name}: {equation} = {dims.world_size}, but there are {world_size} ranks; "
            f"{_advice(name, world_size)}"
        )
    return dims


def dims_of(options, world_size: int) -> ParallelDims:
    """parallel_dims() for the `strategy` group of a config."""
    return parallel_dims(
        options.name,
        world_size,
        getattr(options, "tensor_parallel_size", None),
        getattr(options, "pipeline_parallel_size", None),
    )


def _advice(name: str, world_size: int) -> str:
    if name == "single":
        return "use one device, or strategy=ddp"
    axis = TENSOR if TENSOR in AXES[name] else PIPELINE
    if DATA not in AXES[name]:
        return f"use {axis}_parallel_size={world_size}, or null"
    divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
    return f"{axis}_parallel_size must divide {world_size}: {divisors}"
