"""strategy=tensor_parallel through train.py."""

import pytest
import runs as helpers


class TestStrategy(helpers.PrecisionTests):
    name, data_ranks = "tensor_parallel", [0, 0]

    @pytest.mark.slow  # ddp and fsdp resume in the fast tests
    def test_a_run_with_dropout_resumes_bit_for_bit(self, runs):
        super().test_a_run_with_dropout_resumes_bit_for_bit(runs)


@pytest.mark.slow
def test_checkpoints_with_sharded_weights_can_be_resumed(runs):
    helpers.check_reads_checkpoints_of(runs, "tensor_parallel", "fsdp")
