"""One device: the truth of all others, and what it must do as they do."""

import pytest
import runs as claims


def test_a_stopped_run_with_dropout_goes_on_bit_for_bit(runs):
    claims.check_resumes_exactly(runs, "single")


@pytest.mark.parametrize("source", [name for name in claims.PLACES if name != "single"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "single", source)


def test_activation_checkpointing_keeps_less(runs):
    claims.check_recomputes(runs, "single")


def test_bf16_multiplies_in_bf16(runs):
    claims.check_bf16(runs, "single")
