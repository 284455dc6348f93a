"""Options of train.py have their effect: lengths, learning rates, speed metrics, restarts."""

import json
import re
import shlex
from unittest.mock import patch

import pytest
import runs as helpers
import torch

from gptrain.checkpoints.store import CheckpointStore, verify
from gptrain.core.errors import FAILED, HUNG, PREEMPTED
from gptrain.lit.callbacks import checkpoints

ONE, TWO = helpers.PLACES["single"], helpers.PLACES["ddp"]
BATCH_TOKENS = 16 * 15  # sequences and positions of one step


def steps_of_epochs(run):
    """Return (epoch, optimizer step) of every step, as the training loop counted them."""
    return sorted(set(map(tuple, run.record()["places"])))


@pytest.mark.parametrize(("limit", "n_steps"), [("4", 2), ("0.25", 3)])
def test_limit_train_batches_shortens_each_epoch(limit, n_steps, runs):
    """200 samples give 12 steps of 16, with two micro-steps each; an integer counts micro-steps."""
    run = runs(
        *ONE, f"trainer.limit_train_batches={limit}", "trainer.max_steps=-1",
        "trainer.max_epochs=2", "trainer.val_check_interval=1.0",
    )  # fmt: skip
    expected = [(step // n_steps, step) for step in range(2 * n_steps)]
    assert steps_of_epochs(run) == expected
    assert run.record()["validated"] == [n_steps, 2 * n_steps]
    tokens = torch.cat(run.record()["tokens"])
    first, second = tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]
    assert first.tolist() != second.tolist()  # each epoch has another order


def test_a_fractional_val_check_interval_is_a_fraction_of_an_epoch(runs):
    run = runs(
        *ONE, "data.train.num_samples=64", "trainer.val_check_interval=0.5",
        "trainer.max_steps=7",
    )  # fmt: skip
    assert run.record()["validated"] == [2, 4, 6, 7]  # an epoch is four steps


def test_another_seed_changes_weights_order_and_dropout(runs):
    """The data stay the same, because their seed is set separately."""
    words = (*ONE, *helpers.DROPOUT)
    first, second = runs(*words).record(), runs(*words, "seed=7", "trainer.max_steps=2").record()
    assert not torch.equal(first["weight"], second["weight"])
    assert first["samples"][:2] != second["samples"]
    assert not torch.equal(first["mask"], second["mask"])


@pytest.mark.parametrize(("name", "n_ranks"), [("single", 1), ("ddp", 2)])
def test_speed_metrics_follow_from_the_time_of_a_step(name, n_ranks, runs):
    run = runs(*helpers.PLACES[name], "trainer.max_steps=3", "trainer.val_check_interval=2")
    step_s, tokens_per_s = run.column("perf/step_s"), run.column("perf/tokens_per_s")
    assert len(step_s) == 3 and min(step_s) > 0
    assert [s * speed for s, speed in zip(step_s, tokens_per_s, strict=True)] == pytest.approx(
        3 * [BATCH_TOKENS]
    )
    assert run.column("tokens") == [BATCH_TOKENS * (n + 1) for n in range(3)]
    # 6 FLOPs per weight of a matrix, 12 per layer, width and position (arXiv:2204.02311).
    token_flops = 6 * (4 * 12 * 32**2 + 61 * 32) + 12 * 4 * 32 * 15
    peak = run.record()["peak"]
    expected = [token_flops * speed / n_ranks / peak for speed in tokens_per_s]
    assert run.column("perf/mfu") == pytest.approx(expected, rel=1e-4)
    waited = run.column("perf/data_wait_s")
    assert all(0 <= wait < whole for wait, whole in zip(waited, step_s, strict=True))
    assert ("GiB per rank" in run.output) == (n_ranks > 1)  # the peak memory of the last line
    assert waited.count(0.0) <= 1  # the batches after a validation are already loaded


def test_overfit_batches_repeats_the_same_batches_on_all_ranks(runs):
    run = runs(
        *TWO, "trainer.max_steps=4", "data.global_batch_size=8", "trainer.overfit_batches=2",
        "strategy.static_graph=true",
    )  # fmt: skip
    for number in range(2):
        assert run.record(number)["ddp"]["static_graph"]
    for steps in (slice(0, 2), slice(2, 4)):  # two passes over two batches of each rank
        read = [run.record(number)["samples"][steps] for number in range(2)]
        assert sorted(n for of_rank in read for step in of_rank for n in step) == list(range(16))


def test_a_run_that_always_fails_is_restarted_max_restarts_times(runs):
    run = runs(
        *TWO, "launcher.max_restarts=1",
        "+callbacks.fail._target_=own_parts.FailEachStart", code=FAILED,
    )  # fmt: skip
    assert (run.folder / "starts.txt").read_text() == "0\n0\n"
    assert "this start was to fail" in run.output
    assert run.output.count("started again") == 1
    status = json.loads((run.folder / "status.json").read_text())
    typed = shlex.split(status["resume"])[2:]  # python train.py
    assert {*TWO, "trainer.max_steps=8", f"run_dir={run.folder}"} <= {*typed}
    assert len([word for word in typed if word.startswith("run_dir=")]) == 1


@pytest.mark.slow
def test_a_collective_that_times_out_ends_with_76(runs):
    run = runs(
        *TWO, "strategy.timeout_s=8", "launcher.timeout_s=60",
        "+callbacks.hang._target_=own_parts.HangAt", "+callbacks.hang.step=1", code=HUNG,
    )  # fmt: skip
    assert re.search("error: a collective timed out", run.output)  # the watchdog's time is 60 s
    assert "started again" not in run.output
    assert '"cause": "hang"' in (run.folder / "status.json").read_text()


def train(tmp_path, *words):
    """Run train.py in this process, without the cache; return the exit code and the output."""
    words = (*helpers.WORDS, *helpers.MODEL, *helpers.DATA, *ONE, *words)
    code = helpers.run_train([*words, f"run_dir={tmp_path / 'run'}"], tmp_path / "output")
    return code, (tmp_path / "output").read_text()


@pytest.mark.parametrize("background", [True, False])
def test_saves_in_the_background_are_kept_and_ranked_like_others(background, tmp_path):
    words = ("checkpoint.every_n_steps=2", "checkpoint.keep=2")
    with patch.object(checkpoints, "BACKGROUND_BYTES", 0):
        assert train(tmp_path, f"checkpoint.background={str(background).lower()}", *words)[0] == 0
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest_intact().step == 8
    assert len(store.ranking("val/loss")) == 2
    for path in store.ranking("val/loss"):
        assert verify(path).manifest["metrics"]["val/loss"] > 0


EARLY = (
    "+callbacks.early._target_=lightning.pytorch.callbacks.EarlyStopping",
    "+callbacks.early.monitor=val/loss", "+callbacks.early.divergence_threshold=0.1",
)  # fmt: skip
STOP = (
    "+callbacks.stop._target_=own_parts.StopAt", "+callbacks.stop.step=2",
    "+callbacks.stop.rank=0",
)  # fmt: skip


# A stop request that arrives after the check of a step is handled after the next step.
@pytest.mark.parametrize(
    ("words", "code", "step"),
    [(EARLY, 0, 4), (STOP, PREEMPTED, 3)],
)
def test_a_run_that_ends_early_waits_for_a_background_save(words, code, step, tmp_path):
    with patch.object(checkpoints, "BACKGROUND_BYTES", 0):
        exit_code, output = train(tmp_path, *words)
    assert exit_code == code
    assert any(f"step {step}" in line for line in output.splitlines()[-3:]), output
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest_intact().step == step
