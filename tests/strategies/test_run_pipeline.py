"""strategy=pipeline through train.py."""

import pytest
import runs as helpers


class TestStrategy(helpers.CheckpointingTests):
    name, data_ranks = "pipeline", [0, 0]

    @pytest.mark.slow  # the fast tests have it under fsdp
    def test_activation_checkpointing_saves_fewer_activations(self, runs):
        super().test_activation_checkpointing_saves_fewer_activations(runs)


@pytest.mark.slow
def test_a_pipeline_starts_from_sharded_weights(runs):
    helpers.check_starts_from_weights_of(runs, "pipeline", "fsdp")


# Passes of the first rank's first block in a micro-step of two or four microbatches. gpipe: all
# forward passes first; 1f1b: one forward, one backward once the pipeline is full.
ORDERS = {
    "gpipe": (["0", "1"], "FFBB", "strategy.microbatches=2"),
    "1f1b": (["0", "1"], "FFBFBFBB"),
}


@pytest.mark.parametrize("schedule", ORDERS)
def test_a_schedule_changes_only_the_order_of_passes(schedule, runs):
    blocks, order, *options = ORDERS[schedule]
    words = (f"strategy.schedule={schedule}", "+callbacks.record.passes=true", *options)
    run = runs(*helpers.PLACES["pipeline"], *words, "trainer.max_steps=2")
    truth = helpers.plain(runs, "single")
    for name in ("train/loss", "grad_norm"):
        helpers.check_close(run.column(name), truth.column(name)[:2])
    passes = run.record()["passes"]
    assert sorted({name[1:] for name in passes}) == blocks
    passes = "".join(name[0] for name in passes if name[1:] == "0")
    assert len(passes) == 4 * len(order)  # four micro-steps
    assert passes[: len(order)] == order
