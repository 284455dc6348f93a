"""What a run under a strategy does besides the numbers that tests/truth compares."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from tests.refused.commands import answer
from tests.run import Run, new_place
from tests.run import train as run_train

# V = 61 and T = 15 are not multiples of two ranks. A step of 16 sequences is two micro-steps.
MODEL = (
    "model=gpt_nano", "model.vocab_size=61", "model.d_model=32", "model.n_heads=4",
    "model.n_layers=2", "model.max_seq_len=16",
)  # fmt: skip
DATA = (
    "data.train._target_=tests.truth.own.Ragged", "data.train.num_samples=200", "data.train.seed=3",
    "data.val._target_=tests.truth.own.Ragged", "data.val.num_samples=21", "data.val.seed=4",
    "data.seq_len=15",
)  # fmt: skip
WORDS = (
    "data.batch_size=4", "data.global_batch_size=16", "trainer.accelerator=cpu",
    "trainer.max_steps=3", "trainer.val_check_interval=2", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "strategy.timeout_s=60", "callbacks=none", "logger=none",
    "scheduler=constant", "+callbacks.record._target_=tests.strategies.own_parts.Record",
)  # fmt: skip
ONE, TWO = ("strategy=single", "data.batch_size=8"), ("strategy=ddp",)
DROPOUT = "model.dropout=0.1"
BATCH_TOKENS = 16 * 15  # sequences and positions of one step


def run_of(*words: str, ranks: int = 1, code: int = 0, model=MODEL, data=DATA) -> Run:
    """Return the run with WORDS and these overrides, which other tests may share."""
    run = run_train(*WORDS, *model, *data, *words, ranks=ranks)
    assert run.code == code, run.out + run.err
    return run


def record(run: Run, rank: int = 0) -> dict:
    """Return what `own_parts.Record` recorded in one rank."""
    return torch.load(run.folder / f"record-{rank}.pt", weights_only=True)


def test_limit_train_batches_shortens_each_epoch():
    """200 samples give 12 steps of 16, with two micro-steps each; an integer counts micro-steps."""
    run = run_of(
        *ONE, "trainer.limit_train_batches=4", "trainer.max_steps=-1", "trainer.max_epochs=2",
        "trainer.val_check_interval=1.0",
    )  # fmt: skip
    seen = record(run)
    assert sorted(set(map(tuple, seen["places"]))) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert seen["validated"] == [2, 4]
    assert seen["samples"][:2] != seen["samples"][2:]  # each epoch has another order


def test_speed_metrics_follow_from_the_time_of_a_step():
    run = run_of(*TWO, DROPOUT, ranks=2)
    step_s, tokens_per_s = run.column("perf/step_s"), run.column("perf/tokens_per_s")
    assert len(step_s) == 3 and min(step_s) > 0
    products = [s * speed for s, speed in zip(step_s, tokens_per_s, strict=True)]
    assert products == pytest.approx(3 * [BATCH_TOKENS])
    assert run.column("tokens") == [BATCH_TOKENS * (n + 1) for n in range(3)]
    # 6 FLOPs per weight of a matrix, 12 per layer, width and position (arXiv:2204.02311).
    token_flops = 6 * (2 * 12 * 32**2 + 61 * 32) + 12 * 2 * 32 * 15
    expected = [token_flops * speed / 2 / record(run)["peak"] for speed in tokens_per_s]
    assert run.column("perf/mfu") == pytest.approx(expected, rel=1e-4)
    waited = run.column("perf/data_wait_s")
    assert all(0 <= wait < whole for wait, whole in zip(waited, step_s, strict=True))
    assert "GiB per rank" in run.out


def test_overfit_batches_repeats_the_same_batches_on_all_ranks():
    run = run_of(
        *TWO, "trainer.max_steps=4", "data.global_batch_size=8", "trainer.overfit_batches=2",
        "strategy.static_graph=true", ranks=2,
    )  # fmt: skip
    assert all(record(run, rank)["static_graph"] for rank in range(2))
    for steps in (slice(0, 2), slice(2, 4)):  # two passes over two batches of each rank
        read = [record(run, rank)["samples"][steps] for rank in range(2)]
        assert sorted(n for of_rank in read for step in of_rank for n in step) == list(range(16))


def test_options_of_fsdp_have_their_effect():
    """By default, gradients are reduced once per step. Two blocks are gathered twice."""
    default = record(run_of("strategy=fsdp", ranks=2))
    words = ("strategy.accumulate_shards=true", "strategy.reshard_after_forward=false")
    changed = record(run_of("strategy=fsdp", *words, "trainer.precision=bf16-mixed", ranks=2))
    first, last = (sent["reducescatter"] for sent in default["sent"])
    reduced = [sent["reducescatter"] for sent in changed["sent"]]
    assert first == 0 < last and reduced == [last, last]  # in fp32 in both
    assert default["calls"][0]["allgather"] == 2 + 2 + 1
    assert all(calls["allgather"] <= 2 + 1 for calls in changed["calls"])
    gathered = [seen["sent"][0]["allgather"] / seen["calls"][0]["allgather"] for seen in
                (default, changed)]  # fmt: skip
    assert gathered[1] == pytest.approx(gathered[0] / 2, rel=0.2)


@pytest.mark.parametrize(
    ("name", "dropout"), [("ddp", [DROPOUT]), ("fsdp", []), ("tensor_parallel", [DROPOUT])]
)
def test_the_bytes_that_a_rank_sends_in_a_step_are_those_of_the_plan(name, dropout):
    """Dropout sends nothing, and each rank draws its own."""
    run = run_of(f"strategy={name}", *dropout, ranks=2)
    if dropout:
        masks = [record(run, rank)["mask"][:200] for rank in range(2)]
        assert all(mask.any() for mask in masks) and not torch.equal(*masks)
    sent = sum(sum(kinds.values()) for kinds in record(run)["sent"])
    words = [*MODEL, *DATA, "data.batch_size=4", "data.global_batch_size=16", f"strategy={name}"]
    words += ["trainer.devices=2", "hardware=h100_sxm", "trainer.precision=32-true", "--json"]
    planned = answer(f"plan {' '.join(words)}", new_place())
    assert planned.code == 0, planned.err
    row = json.loads("\n".join(planned.out))["strategies"][name]
    assert sent == pytest.approx(row["wire_bytes_per_step"], rel=0.05)


@pytest.mark.slow
def test_a_sharded_net_samples_the_same_text_as_one_process(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be " * 400)
    words = (
        "trainer.max_steps=2", "+callbacks.sample._target_=gptrain.lit.callbacks.SampleText",
        "+callbacks.sample.prompt='not '", "+callbacks.sample.n_tokens=10",
    )  # fmt: skip
    data = ("data=text", f"data.path={tmp_path}/text.txt", f"output_dir={tmp_path}",
            "data.seq_len=15")  # fmt: skip
    texts = []
    for place, ranks in ((ONE, 1), (("strategy=tensor_parallel",), 2)):
        model = (*MODEL, "model.vocab_size=256")
        run = run_of(*place, *words, ranks=ranks, model=model, data=data)
        texts.append(re.search(r"^sample {4}(not .*)$", run.out, re.MULTILINE).group(1))
        bits = [nats / math.log(2) for nats in run.column("val/loss")]  # a token is a byte
        assert run.column("val/bits_per_byte") == pytest.approx(bits, rel=1e-6)
    assert texts[0] == texts[1] != "not "
