"""strategy=tensor_parallel through train.py."""

import runs as helpers


class TestStrategy(helpers.PrecisionTests):
    name, data_ranks = "tensor_parallel", [0, 0]


def test_checkpoints_with_sharded_weights_can_be_resumed(runs):
    helpers.check_reads_checkpoints_of(runs, "tensor_parallel", "fsdp")
