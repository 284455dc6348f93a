"""One device: the truth of all others, and what it must do as they do."""

import pytest
import runs as claims


class TestEveryClaim(claims.FewRanks):
    name, data_ranks = "single", [0]


@pytest.mark.parametrize("source", ["fsdp_tensor_parallel", "ddp_pipeline", "hsdp"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "single", source)
