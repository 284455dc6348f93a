"""strategy=ddp through train.py."""

import pytest
import runs as claims


def test_it_equals_one_process(runs):
    claims.check_equals_one_process(runs, "ddp")


def test_a_stopped_run_with_dropout_goes_on_bit_for_bit(runs):
    claims.check_resumes_exactly(runs, "ddp")


@pytest.mark.parametrize("source", ["single", "fsdp", "tensor_parallel", "pipeline"])
def test_it_reads_checkpoints_of(source, runs):
    claims.check_reads_checkpoints_of(runs, "ddp", source)


def test_each_rank_reads_samples_of_its_own(runs):
    claims.check_samples(runs, "ddp", [0, 1])


def test_each_rank_draws_dropout_of_its_own(runs):
    claims.check_dropout_differs(runs, "ddp", 2)


def test_activation_checkpointing_keeps_less(runs):
    claims.check_recomputes(runs, "ddp")


def test_bf16_multiplies_in_bf16(runs):
    claims.check_bf16(runs, "ddp")


def test_gradients_are_sent_once_per_step_and_halved_by_a_hook(runs):
    sent = {}
    for hook in ("none", "bf16"):
        run = runs(*claims.PLACES["ddp"], f"strategy.comm_hook={hook}", "trainer.max_steps=2")
        first, last = run.record()["sent"]  # of the micro-steps of one step
        assert not first.get("allreduce")
        sent[hook] = last["allreduce"]
    n_bytes = 4 * sum(w.numel() for w in set(claims.plain(runs, "ddp").weights().values()))
    assert sent["none"] == pytest.approx(n_bytes - 4 * 61 * 32)  # head and table are one
    assert sent["bf16"] == sent["none"] / 2
