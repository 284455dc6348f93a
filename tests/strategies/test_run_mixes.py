"""strategy=fsdp_tensor_parallel, ddp_pipeline, and fsdp with replicas, on four ranks."""

import pytest
import runs as helpers


class TestFSDPTensorParallel(helpers.StrategyTests):
    """The ranks of a tensor-parallel group are neighbours."""

    name, data_ranks = "fsdp_tensor_parallel", [0, 0, 1, 1]


class TestDDPPipeline(helpers.StrategyTests):
    """The stages of a pipeline are on the most distant ranks."""

    name, data_ranks = "ddp_pipeline", [0, 1, 0, 1]


class TestHSDP(helpers.StrategyTests):
    """Two copies of the net, each sharded over two neighbouring ranks."""

    name, data_ranks = "hsdp", [0, 1, 2, 3]


def test_copies_exchange_only_the_gradients_of_their_shards(runs):
    """A rank reduces gradients with its neighbour, then its half of them with the other copy."""
    run = helpers.plain(runs, "hsdp")
    (sent,) = run.record()["sent"]
    weights = {
        tensor.data_ptr(): tensor for tensor in run.weights().values()
    }  # a tied weight counts once
    half = sum(tensor.nbytes for tensor in weights.values()) / 2
    assert sent["reducescatter"] == pytest.approx(half, rel=1e-2)  # some rows are padding
    # 2 (n-1)/n of half the bytes for n = 2, and the step's number of targets over four ranks
    assert sent["allreduce"] == sent["reducescatter"] + 12


@pytest.mark.slow
def test_a_combined_strategy_starts_from_weights_of_one_process(runs):
    helpers.check_starts_from_weights_of(runs, "fsdp_tensor_parallel", "single")


@pytest.mark.parametrize(
    "name", ["ddp_pipeline", pytest.param("fsdp_tensor_parallel", marks=pytest.mark.slow)]
)
def test_muon_with_sharded_or_replicated_matrices_equals_one_process(name, runs):
    helpers.check_muon(runs, name)
