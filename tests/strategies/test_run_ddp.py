"""strategy=ddp through train.py."""

import pytest
import runs as helpers
import torch


class TestStrategy(helpers.StrategyTests):
    name, data_ranks = "ddp", [0, 1]


def test_muon_with_its_work_divided_over_ranks_equals_one_process(runs):
    helpers.check_muon(runs, "ddp")


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
