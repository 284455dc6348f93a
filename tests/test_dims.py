"""The sizes of a strategy's axes multiply to the world size, or the error shows the equation."""

import pytest

from gptrain.core.strategies import ParallelDims, default_options, parallel_dims, stage_blocks


@pytest.mark.parametrize(
    ("name", "sizes", "n_ranks", "n_nodes", "expected"),
    [
        ("auto", {}, 1, 1, {}),
        ("auto", {}, 2, 1, {"data": 2}),
        ("fsdp", {}, 8, 1, {"data": 8}),
        ("fsdp", {"replicas": 4}, 8, 1, {"data": 8, "replicas": 4}),  # HSDP: 4 copies on 2 ranks
        ("tensor_parallel", {}, 4, 1, {"tensor": 4}),
        ("pipeline", {"pipeline_parallel_size": 4}, 4, 1, {"pipeline": 4}),
        ("fsdp_tensor_parallel", {}, 8, 1, {"data": 4, "tensor": 2}),
        ("fsdp_tensor_parallel", {"tensor_parallel_size": 4}, 8, 1, {"data": 2, "tensor": 4}),
        ("ddp_pipeline", {"pipeline_parallel_size": 3}, 6, 1, {"data": 2, "pipeline": 3}),
        ("context_parallel", {}, 8, 1, {"context": 8}),
        ("context_parallel", {}, 16, 2, {"data": 2, "context": 8}),  # the ranks of a node
        ("context_parallel", {"context_parallel_size": 3}, 6, 1, {"data": 2, "context": 3}),
    ],
)
def test_data_parallelism_uses_the_ranks_that_the_other_axes_leave(
    name, sizes, n_ranks, n_nodes, expected
):
    options = default_options(name).model_copy(update=sizes)
    dims = parallel_dims(options, n_ranks, n_nodes)
    assert dims == ParallelDims(**expected) and dims.world_size == n_ranks


def test_an_axis_that_does_not_divide_the_ranks_is_an_equation():
    options = default_options("context_parallel").model_copy(update={"context_parallel_size": 3})
    with pytest.raises(ValueError, match=r"data 2 x context 3 .*= 6, but there are 8 ranks"):
        parallel_dims(options, 8)


def test_the_first_stages_of_a_pipeline_hold_the_blocks_that_are_left_over():
    stages = [stage_blocks(stage, 4, 6) for stage in range(4)]
    assert [len(blocks) for blocks in stages] == [2, 1, 2, 1]
    assert [block for blocks in stages for block in blocks] == list(range(6))


def test_neighbouring_ranks_read_the_same_samples_in_every_stage_of_a_pipeline():
    dims = ParallelDims(data=2, tensor=2, pipeline=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
