"""strategy=ddp through train.py."""

import pytest
import runs as claims
import torch


class TestEveryClaim(claims.FewRanks):
    name, data_ranks = "ddp", [0, 1]


def test_muon_whose_work_ranks_divide_equals_one_process(runs):
    claims.check_muon(runs, "ddp")


@pytest.mark.parametrize("source", ["single", "fsdp"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "ddp", source)


def test_each_rank_draws_dropout_of_its_own_where_one_process_was_saved(runs):
    saved = runs(*claims.PLACES["single"], *claims.DROPOUT).checkpoint(4)
    words = (f"ckpt_path={saved}", "trainer.max_steps=6", "+callbacks.record.look_at=5")
    run = runs(*claims.PLACES["ddp"], *claims.DROPOUT, *words)
    masks = [run.record(rank)["mask"] for rank in range(2)]
    assert masks[0].any() and not torch.equal(*masks)


def test_gradients_are_sent_once_per_step_and_halved_by_a_hook(runs):
    sent = {}
    for hook in ("none", "bf16"):
        run = runs(*claims.PLACES["ddp"], f"strategy.comm_hook={hook}", "trainer.max_steps=2")
        first, last = run.record()["sent"]  # of the micro-steps of one step
        assert first["allreduce"] == 8  # how many targets the step has
        sent[hook] = last["allreduce"]
    n_bytes = 4 * sum(w.numel() for w in set(claims.plain(runs, "ddp").weights().values()))
    assert sent["none"] == pytest.approx(n_bytes - 4 * 61 * 32)  # head and table are one
    assert sent["bf16"] == sent["none"] / 2
