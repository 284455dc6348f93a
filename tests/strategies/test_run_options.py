"""Options of a run that must do something, through train.py: lengths, rates, figures, restarts."""

import math
import re
from unittest.mock import patch

import pytest
import runs as claims
import torch

from gptrain.lit.callbacks import checkpoints
from gptrain.problems import FAILED, HUNG
from gptrain.resilience.store import CheckpointStore

ONE, TWO = claims.PLACES["single"], claims.PLACES["ddp"]
BATCH_TOKENS = 16 * 15  # sequences and positions of one step


def steps_of_epochs(run):
    """(epoch, optimizer step) of every step, as the loop counted them."""
    return sorted(set(map(tuple, run.record()["places"])))


@pytest.mark.parametrize(("limit", "n_steps"), [("8", 2), ("0.25", 3)])
def test_limit_train_batches_shortens_each_epoch(limit, n_steps, runs):
    """200 samples are 12 steps of 16, of four micro-steps each; an integer counts micro-steps."""
    run = runs(
        *ONE, f"trainer.limit_train_batches={limit}", "trainer.max_steps=-1",
        "trainer.max_epochs=2", "trainer.val_check_interval=1.0",
    )  # fmt: skip
    expected = [(step // n_steps, step) for step in range(2 * n_steps)]
    assert steps_of_epochs(run) == expected
    assert run.record()["validated"] == [n_steps, 2 * n_steps]
    tokens = torch.cat(run.record()["tokens"])
    first, second = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    assert first.tolist() != second.tolist()  # each epoch in an order of its own


def test_a_fraction_of_val_check_interval_is_of_an_epoch(runs):
    run = runs(
        *ONE, "data.train.num_samples=64", "trainer.val_check_interval=0.5",
        "trainer.max_steps=7",
    )  # fmt: skip
    assert run.record()["validated"] == [2, 4, 6, 7]  # an epoch is four steps


def test_every_step_is_taken_at_the_learning_rate_of_the_schedule(runs):
    """Of the optimizer's own groups as it steps, against the formula."""
    run = claims.plain(runs, "ddp")

    def rate(step):
        if step < 2:
            return 1e-3 * (0.1 + 0.9 * step / 2)
        return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 2) / (claims.N_STEPS - 3))) / 2)

    expected = [rate(step) for step in range(claims.N_STEPS)]
    for rank in range(2):
        taken = run.record(rank)["lrs"]
        assert {len(set(groups)) for groups in taken} == {1}  # every group alike
        assert [groups[0] for groups in taken] == pytest.approx(expected)
    assert run.column("lr") == pytest.approx(expected)


@pytest.mark.parametrize(("name", "n_ranks"), [("single", 1), ("ddp", 2), ("pipeline", 2)])
def test_figures_of_speed_follow_from_the_time_of_a_step(name, n_ranks, runs):
    run = claims.plain(runs, name)
    step_s, tokens_per_s = run.column("perf/step_s"), run.column("perf/tokens_per_s")
    assert len(step_s) == claims.N_STEPS and min(step_s) > 0
    assert [s * speed for s, speed in zip(step_s, tokens_per_s, strict=True)] == pytest.approx(
        claims.N_STEPS * [BATCH_TOKENS]
    )
    assert run.column("tokens") == [BATCH_TOKENS * (n + 1) for n in range(claims.N_STEPS)]
    # 6 FLOPs per weight of a matrix, 12 per layer, width and position (arXiv:2204.02311).
    token_flops = 6 * (4 * 12 * 32**2 + 61 * 32) + 12 * 4 * 32 * 15
    peak = run.record()["peak"]
    expected = [token_flops * speed / n_ranks / peak for speed in tokens_per_s]
    assert run.column("perf/mfu") == pytest.approx(expected, rel=1e-4)
    waited = run.column("perf/data_wait_s")
    assert all(0 <= wait < whole for wait, whole in zip(waited, step_s, strict=True))


def test_deterministic_reaches_every_rank(runs):
    run = runs(*TWO, "trainer.max_steps=2", "trainer.deterministic=true")
    plain = claims.plain(runs, "ddp")
    for rank in range(2):
        assert run.record(rank)["deterministic"] and not plain.record(rank)["deterministic"]
    assert run.column("train/loss") == plain.column("train/loss")[:2]


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_run_that_always_fails_is_started_max_restarts_times_more(max_restarts, runs):
    run = runs(
        *TWO, f"launcher.max_restarts={max_restarts}",
        "+callbacks.fail._target_=own.FailEachStart", code=FAILED,
    )  # fmt: skip
    assert (run.folder / "starts.txt").read_text() == (1 + max_restarts) * "0\n"
    assert "this start was to fail" in run.said
    assert run.said.count("started again") == max_restarts


def test_a_collective_that_times_out_ends_with_76(runs):
    run = runs(
        *TWO, "strategy.timeout_s=8", "launcher.timeout_s=60",
        "+callbacks.hang._target_=own.HangAt", "+callbacks.hang.step=1", code=HUNG,
    )  # fmt: skip
    assert re.search("error: .*(collective timed out|no progress)", run.said)
    assert '"cause": "hang"' in (run.folder / "status.json").read_text()


ONLY_FORWARD = (
    "model=gpt_nano", "model._target_=own.OnlyForward", "model.vocab_size=61", "model.d_model=8",
    "~model.n_heads", "~model.n_layers", "~model.max_seq_len", "~model.dropout",
    "~model.activation",
)  # fmt: skip


def test_a_net_with_forward_alone_trains_under_ddp(runs):
    run, truth = (runs(*place, "trainer.max_steps=2", model=ONLY_FORWARD) for place in (TWO, ONE))
    claims.check_close(run.column("train/loss"), truth.column("train/loss"))


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("fsdp", ["blocks"]),
        ("tensor_parallel", ["tensor_plan", "n_heads", "head"]),
        ("pipeline", ["embed", "blocks", "norm", "head"]),
    ],
)
def test_other_strategies_name_what_such_a_net_lacks(name, lacks, runs):
    run = runs(*claims.PLACES[name], model=ONLY_FORWARD, code=2)
    for word in lacks:
        assert re.search(rf"error: .*\b{word}\b", run.said), run.said
    assert not run.folder.exists()


def test_blocks_are_compiled_where_asked(tmp_path):
    """With a compiler that changes nothing: torch's own takes half a minute."""
    with patch.object(torch, "compile", side_effect=lambda function: function) as compiled:
        words = (*claims.WORDS, *claims.MODEL, *claims.DATA, *ONE, "trainer.max_steps=1")
        folder = f"run_dir={tmp_path / 'run'}"
        assert claims.run_train([*words, folder, "model.compile=blocks"], tmp_path / "said") == 0
    assert compiled.call_count == 4


@pytest.mark.parametrize("background", [True, False])
def test_a_large_save_is_written_in_the_background_unless_told_otherwise(background, tmp_path):
    asked = []

    def writing(store, step, *, in_background, **options):
        asked.append((step, in_background))
        return write(store, step, in_background=in_background, **options)

    write = CheckpointStore.writing
    words = (*claims.WORDS, *claims.MODEL, *claims.DATA, *ONE, f"run_dir={tmp_path / 'run'}")
    with (
        patch.object(checkpoints, "BACKGROUND_BYTES", 0),
        patch.object(CheckpointStore, "writing", writing),
    ):
        option = f"checkpoint.background={str(background).lower()}"
        assert claims.run_train([*words, option], tmp_path / "said") == 0
    assert asked == [(4, background), (8, False)]  # the last is there when the run ends
