"""strategy=ddp through train.py."""

import pytest
import runs as helpers
import torch


class TestStrategy(helpers.StrategyTests):
    name, data_ranks = "ddp", [0, 1]


def test_a_stopped_run_with_dropout_resumes_bit_for_bit(runs):
    """A stop signal reaches one rank between validations, and the run resumes in its folder."""
    words = (*helpers.PLACES["ddp"], *helpers.DROPOUT, "trainer.val_check_interval=6")
    whole = runs(*words)
    stop = (
        "+callbacks.stop._target_=own_parts.StopAt", "+callbacks.stop.step=3",
        "+callbacks.stop.rank=1",
    )  # fmt: skip
    stopped = runs(*words, *stop, code=75)
    assert 3 < stopped.n_steps < 6
    resumed = runs(*words, "ckpt_path=last", begun=stopped)
    assert resumed.record()["places"][0][1] == stopped.n_steps
    helpers.check_same_bits(resumed, whole)
    assert not torch.equal(*(whole.record(rank)["mask"] for rank in range(2)))


def test_muon_with_its_work_divided_over_ranks_equals_one_process(runs):
    helpers.check_muon(runs, "ddp")


def test_checkpoints_with_sharded_weights_can_be_resumed(runs):
    helpers.check_reads_checkpoints_of(runs, "ddp", "fsdp")


def test_each_rank_draws_its_own_dropout_after_resuming_from_one_process(runs):
    saved = runs(*helpers.PLACES["single"], *helpers.DROPOUT).checkpoint(3)
    words = (f"ckpt_path={saved}", "trainer.max_steps=5", "+callbacks.record.look_at=4")
    run = runs(*helpers.PLACES["ddp"], *helpers.DROPOUT, *words)
    masks = [run.record(rank)["mask"] for rank in range(2)]
    assert masks[0].any() and not torch.equal(*masks)


def test_gradients_are_sent_once_per_step_and_halved_by_a_hook(runs):
    plain = helpers.plain(runs, "ddp")
    halved = runs(*helpers.PLACES["ddp"], "strategy.comm_hook=bf16", "trainer.max_steps=2")
    n_bytes = 4 * sum(w.numel() for w in set(plain.weights().values()))
    n_bytes -= 4 * 61 * 32  # the head and the embedding share their weight
    for run, expected in ((plain, n_bytes), (halved, n_bytes / 2)):
        first, last = run.record()["sent"]  # the micro-steps of one step
        assert first["allreduce"] == 8  # the step's number of targets
        assert last["allreduce"] == pytest.approx(expected)
