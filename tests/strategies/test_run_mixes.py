"""strategy=fsdp_tensor_parallel and strategy=ddp_pipeline on four ranks through train.py."""

import pytest
import runs as claims

MIXES = ["fsdp_tensor_parallel", "ddp_pipeline"]


class TestFSDPTensorParallel(claims.Claims):
    """Ranks of a tensor group are neighbours."""

    name, data_ranks = "fsdp_tensor_parallel", [0, 0, 1, 1]


class TestDDPPipeline(claims.Claims):
    """Stages of a pipeline lie furthest apart."""

    name, data_ranks = "ddp_pipeline", [0, 1, 0, 1]


@pytest.mark.parametrize("name", MIXES)
def test_it_starts_from_weights_of_one_process(name, runs):
    claims.check_starts_from_weights_of(runs, name, "single")


def test_muon_of_matrices_sharded_twice_equals_one_process(runs):
    claims.check_muon(runs, "fsdp_tensor_parallel")
