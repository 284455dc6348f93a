"""strategy=single through train.py: the reference of all other strategies."""

import pytest
import runs as helpers


class TestStrategy(helpers.PrecisionTests):
    name, data_ranks = "single", [0]


@pytest.mark.parametrize("source", ["fsdp_tensor_parallel", "ddp_pipeline", "hsdp"])
def test_checkpoints_of_other_strategies_can_be_resumed(source, runs):
    helpers.check_reads_checkpoints_of(runs, "single", source)
