"""strategy=pipeline through train.py."""

import pytest
import runs as claims


def test_it_equals_one_process(runs):
    claims.check_equals_one_process(runs, "pipeline")


def test_a_stopped_run_with_dropout_goes_on_bit_for_bit(runs):
    claims.check_resumes_exactly(runs, "pipeline")


@pytest.mark.parametrize("source", ["single", "fsdp", "tensor_parallel"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "pipeline", source)


@pytest.mark.parametrize("source", ["single", "tensor_parallel"])
def test_it_starts_from_weights_of(source, runs):
    claims.check_starts_from_weights_of(runs, "pipeline", source)


def test_both_ranks_read_the_same_samples(runs):
    claims.check_samples(runs, "pipeline", [0, 0])


def test_each_rank_draws_dropout_of_its_own(runs):
    claims.check_dropout_differs(runs, "pipeline", 2)


def test_activation_checkpointing_keeps_less(runs):
    claims.check_recomputes(runs, "pipeline")


def test_bf16_multiplies_in_bf16(runs):
    claims.check_bf16(runs, "pipeline")


# Passes of the first rank's first block in a micro-step of four microbatches: all forward first;
# one forward and one backward once the pipeline is filled; two rounds of two, two stages a rank.
ORDERS = {
    "gpipe": (["0", "1"], "FFFFBBBB"),
    "1f1b": (["0", "1"], "FFBFBFBB"),
    "interleaved_1f1b": (["0", "2"], "FFFFBBBB"),
}


@pytest.mark.parametrize("schedule", ORDERS)
def test_a_schedule_changes_the_order_of_passes_and_no_number(schedule, runs):
    words = (f"strategy.schedule={schedule}", "+callbacks.record.passes=true")
    run = runs(*claims.PLACES["pipeline"], *words, "trainer.max_steps=2")
    claims.check_close(
        run.column("train/loss"), claims.plain(runs, "single").column("train/loss")[:2]
    )
    blocks, order = ORDERS[schedule]
    passes = run.record()["passes"]
    assert sorted({name[1:] for name in passes}) == blocks
    passes = "".join(name[0] for name in passes if name[1:] == "0")
    assert len(passes) == 4 * len(order)  # four micro-steps
    assert passes[: len(order)] == order
