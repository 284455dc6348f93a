"""strategy=fsdp_tensor_parallel, ddp_pipeline, and fsdp with replicas, on four ranks."""

import pytest
import runs as helpers


class TestFSDPTensorParallel(helpers.ResumeTests):
    """Ranks of a tensor group are neighbours."""

    name, data_ranks = "fsdp_tensor_parallel", [0, 0, 1, 1]


class TestDDPPipeline(helpers.ResumeTests):
    """Stages of a pipeline lie furthest apart."""

    name, data_ranks = "ddp_pipeline", [0, 1, 0, 1]


class TestHSDP(helpers.StrategyTests):
    """Two copies of the net, each sharded over two neighbours."""

    name, data_ranks = "hsdp", [0, 1, 2, 3]


def test_copies_exchange_gradients_alone_and_of_a_shard_each(runs):
    """A rank reduces gradients with its neighbour, then its half of them with the other copy."""
    run = helpers.plain(runs, "hsdp")
    (sent,) = run.record()["sent"]
    weights = {tensor.data_ptr(): tensor for tensor in run.weights().values()}  # a tied one once
    half = sum(tensor.nbytes for tensor in weights.values()) / 2
    assert sent["reducescatter"] == pytest.approx(half, rel=1e-2)  # rows of padding
    # 2 (n-1)/n of half, n = 2; and how many targets the step has, over four ranks
    assert sent["allreduce"] == sent["reducescatter"] + 12


def test_it_starts_from_weights_of_one_process(runs):
    helpers.check_starts_from_weights_of(runs, "fsdp_tensor_parallel", "single")


@pytest.mark.parametrize("name", ["fsdp_tensor_parallel", "ddp_pipeline"])
def test_muon_of_matrices_sharded_or_copied_equals_one_process(name, runs):
    helpers.check_muon(runs, name)
