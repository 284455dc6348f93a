"""The sizes of a strategy's axes multiply to the world size, or the error shows the equation."""

import pytest

from gptrain.core.strategies import (
    ParallelDims,
    default_options,
    options_for,
    parallel_dims,
    stage_blocks,
)
from tests.command_line import compose_run


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


def test_options_that_two_strategies_share_are_taken_over_when_strategies_are_compared():
    copies = default_options("fsdp").model_copy(update={"replicas": 2, "cpu_offload": True})
    assert options_for("fsdp", copies) == copies
    compared = options_for("fsdp_tensor_parallel", copies)
    assert (compared.name, compared.cpu_offload) == ("fsdp_tensor_parallel", True)
    buckets = default_options("auto").model_copy(update={"bucket_cap_mb": 3})
    ddp = options_for("ddp", buckets)
    assert (ddp.name, ddp.bucket_cap_mb) == ("ddp", 3)


def test_the_first_stages_of_a_pipeline_hold_the_blocks_that_are_left_over():
    stages = [stage_blocks(stage, 4, 6) for stage in range(4)]
    assert [len(blocks) for blocks in stages] == [2, 1, 2, 1]
    assert [block for blocks in stages for block in blocks] == list(range(6))


def test_heads_of_k_and_v_are_repeated_for_the_ranks_of_a_sequence():
    words = ("model=llama_nano", "model.n_kv_heads=2", "trainer=cpu", "trainer.devices=4")
    assert compose_run(*words, "strategy=context_parallel").model.n_heads == 4


def test_neighbouring_ranks_read_the_same_samples_in_every_stage_of_a_pipeline():
    dims = ParallelDims(data=2, tensor=2, pipeline=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
