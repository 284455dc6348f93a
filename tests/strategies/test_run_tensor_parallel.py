"""strategy=tensor_parallel through train.py."""

import pytest
import runs as claims


class TestEveryClaim(claims.FewRanks):
    name, data_ranks = "tensor_parallel", [0, 0]


@pytest.mark.parametrize("source", ["single", "fsdp", "pipeline"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "tensor_parallel", source)


def test_it_starts_from_sharded_weights(runs):
    claims.check_starts_from_weights_of(runs, "tensor_parallel", "fsdp")


def test_muon_equals_one_process(runs):
    claims.check_muon(runs, "tensor_parallel")
