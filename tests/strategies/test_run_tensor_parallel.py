"""strategy=tensor_parallel through train.py."""

import pytest
import runs as claims


def test_it_equals_one_process(runs):
    claims.check_equals_one_process(runs, "tensor_parallel")


def test_a_stopped_run_with_dropout_goes_on_bit_for_bit(runs):
    claims.check_resumes_exactly(runs, "tensor_parallel")


@pytest.mark.parametrize("source", ["single", "fsdp", "pipeline"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "tensor_parallel", source)


def test_it_starts_from_sharded_weights(runs):
    claims.check_starts_from_weights_of(runs, "tensor_parallel", "fsdp")


def test_both_ranks_read_the_same_samples(runs):
    claims.check_samples(runs, "tensor_parallel", [0, 0])


def test_each_rank_draws_dropout_of_its_own(runs):
    claims.check_dropout_differs(runs, "tensor_parallel", 2)


def test_activation_checkpointing_keeps_less(runs):
    claims.check_recomputes(runs, "tensor_parallel")


def test_bf16_multiplies_in_bf16(runs):
    claims.check_bf16(runs, "tensor_parallel")


def test_muon_equals_one_process(runs):
    claims.check_muon(runs, "tensor_parallel")
