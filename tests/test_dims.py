"""The sizes of a strategy's axes multiply to the world size, or the error shows the equation."""

import pytest

from gptrain.core.strategies import (
    ParallelDims,
    default_options,
    parallel_dims,
    stage_blocks,
)


def options(name, tensor, pipeline):
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    return default_options(name).model_copy(update=sizes)


@pytest.mark.parametrize(
    ("name", "world_size", "tensor", "pipeline", "expected"),
    [
        ("auto", 1, None, None, ParallelDims()),
        ("auto", 2, None, None, ParallelDims(data=2)),
        ("fsdp", 8, None, None, ParallelDims(data=8)),
        ("tensor_parallel", 4, None, None, ParallelDims(tensor=4)),
        ("pipeline", 4, None, 4, ParallelDims(pipeline=4)),
        ("fsdp_tensor_parallel", 8, None, None, ParallelDims(data=4, tensor=2)),
        ("fsdp_tensor_parallel", 8, 4, None, ParallelDims(data=2, tensor=4)),
        ("ddp_pipeline", 6, None, 3, ParallelDims(data=2, pipeline=3)),
    ],
)
def test_data_parallelism_uses_the_ranks_that_tensor_and_pipeline_leave(
    name, world_size, tensor, pipeline, expected
):
    assert parallel_dims(options(name, tensor, pipeline), world_size) == expected


def test_a_context_group_has_the_ranks_of_a_node_unless_its_size_is_given():
    given = default_options("context_parallel")
    assert parallel_dims(given, 8) == ParallelDims(context=8)
    assert parallel_dims(given, 16, n_nodes=2) == ParallelDims(data=2, context=8)
    sized = given.model_copy(update={"context_parallel_size": 3})
    assert parallel_dims(sized, 6) == ParallelDims(data=2, context=3)
    words = r"data 2 x context 3 .*= 6, but there are 8 ranks"
    with pytest.raises(ValueError, match=words):
        parallel_dims(sized, 8)


def test_replicas_are_of_the_data_axis():
    """HSDP: four copies of the net, each sharded over two ranks."""
    dims = parallel_dims(default_options("fsdp").model_copy(update={"replicas": 4}), 8)
    assert dims == ParallelDims(data=8, replicas=4) and dims.world_size == 8


def test_the_first_stages_of_a_pipeline_hold_the_blocks_that_are_left_over():
    stages = [stage_blocks(stage, 4, 6) for stage in range(4)]
    assert [len(blocks) for blocks in stages] == [2, 1, 2, 1]
    assert [block for blocks in stages for block in blocks] == list(range(6))


def test_neighbouring_ranks_read_the_same_samples_in_every_stage_of_a_pipeline():
    dims = ParallelDims(data=2, tensor=2, pipeline=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
