"""The sizes of a strategy's axes multiply to the world size, or the error shows the equation."""

import pytest

from gptrain.core.strategies import ParallelDims, default_options, parallel_dims


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


@pytest.mark.parametrize(
    ("name", "world_size", "tensor", "pipeline", "words"),
    [
        ("fsdp_tensor_parallel", 8, 3, None, "data 2 x tensor 3 x pipeline 1 = 6"),
        ("fsdp_tensor_parallel", 2, 4, None, "must divide 2: 1, 2"),
        ("tensor_parallel", 4, 2, None, "use tensor_parallel_size=4"),
        ("pipeline", 4, None, 8, "pipeline 8 = 8, but there are 4 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_equation(
    name, world_size, tensor, pipeline, words
):
    with pytest.raises(ValueError, match=words):
        parallel_dims(options(name, tensor, pipeline), world_size)


def test_a_context_group_has_the_ranks_of_a_node_unless_its_size_is_given():
    given = default_options("context_parallel")
    assert parallel_dims(given, 8) == ParallelDims(context=8)
    assert parallel_dims(given, 16, n_nodes=2) == ParallelDims(data=2, context=8)
    sized = given.model_copy(update={"context_parallel_size": 3})
    assert parallel_dims(sized, 6) == ParallelDims(data=2, context=3)
    with pytest.raises(ValueError, match=r"data 2 x context 3 .*= 6, but there are 8 ranks"):
        parallel_dims(sized, 8)


def test_replicas_are_of_the_data_axis():
    """HSDP: four copies of the net, each sharded over two ranks."""
    dims = parallel_dims(default_options("fsdp").model_copy(update={"replicas": 4}), 8)
    assert dims == ParallelDims(data=8, replicas=4) and dims.world_size == 8


def test_a_replica_of_diloco_is_a_machine_or_on_one_machine_a_rank():
    given = default_options("diloco")
    assert [given.on_ranks(nodes, 8).copies for nodes in (1, 2)] == [8, 2]
    assert given.model_copy(update={"replicas": 4}).on_ranks(2, 8).copies == 4


def test_neighbouring_ranks_read_the_same_samples_in_every_stage_of_a_pipeline():
    dims = ParallelDims(data=2, tensor=2, pipeline=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
