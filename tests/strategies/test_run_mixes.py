"""strategy=fsdp_tensor_parallel and strategy=ddp_pipeline on four ranks through train.py."""

import pytest
import runs as claims

MIXES = ["fsdp_tensor_parallel", "ddp_pipeline"]
# Ranks of a tensor group are neighbours, stages of a pipeline lie furthest apart.
DATA_RANKS = {"fsdp_tensor_parallel": [0, 0, 1, 1], "ddp_pipeline": [0, 1, 0, 1]}
each_mix = pytest.mark.parametrize("name", MIXES)


@each_mix
def test_it_equals_one_process(name, runs):
    claims.check_equals_one_process(runs, name)


@each_mix
def test_a_stopped_run_with_dropout_goes_on_bit_for_bit(name, runs):
    claims.check_resumes_exactly(runs, name)


@pytest.mark.parametrize(
    ("name", "source"), [tuple(MIXES), tuple(MIXES[::-1]), *(("single", mix) for mix in MIXES)]
)
def test_one_reads_checkpoints_of_the_other(name, source, runs):
    claims.check_reads_checkpoints_of(runs, name, source)


@each_mix
def test_it_starts_from_weights_of_one_process(name, runs):
    claims.check_starts_from_weights_of(runs, name, "single")


@each_mix
def test_ranks_of_a_group_read_the_same_samples_and_data_ranks_different_ones(name, runs):
    claims.check_samples(runs, name, DATA_RANKS[name])


@each_mix
def test_each_rank_draws_dropout_of_its_own(name, runs):
    claims.check_dropout_differs(runs, name, 4)


def test_muon_of_matrices_sharded_twice_equals_one_process(runs):
    claims.check_muon(runs, "fsdp_tensor_parallel")
