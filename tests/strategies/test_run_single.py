"""One device: the truth of all others, and what it must do as they do."""

import pytest
import runs as helpers


class TestStrategy(helpers.PrecisionTests):
    name, data_ranks = "single", [0]


@pytest.mark.parametrize("source", ["fsdp_tensor_parallel", "ddp_pipeline", "hsdp"])
def test_it_reads_checkpoints_of(source, runs):
    helpers.check_reads_checkpoints_of(runs, "single", source)
