"""Each sample of a step and of an evaluation counts once, and the set is that of one process."""

from __future__ import annotations

import json

import pytest

OWN = "tests.truth.own_training"
GPT = ("model=gpt_nano", "model.d_model=16", "model.n_heads=2", "model.n_layers=2")
WORDS = (
    "model.vocab_size=64", "data.seq_len=9", "data.num_samples=16", "data.val.num_samples=21",
    "data.batch_size=4", "scheduler=constant", "trainer.max_steps=2",
    "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false", "callbacks=none", "logger=none", "checkpoint=none",
)  # fmt: skip
SUMS = (f"module._target_={OWN}.Sums", f"+callbacks.sums._target_={OWN}.CountsBatches")
# Targets of a step and of the validation
COUNTS = {"train/n": 4 * 8, "val/n": 21 * 8, "val/metric": 21 * 8, "val/callback": 21 * 8}


@pytest.fixture
def values(train):
    """Return a function that runs train.py and returns all logged values of the run."""

    def run(*words):
        name = f"run{len(made)}"
        made.append(name)
        run = train(*WORDS, *words, name=name, tiny=False)
        assert run.code == 0, run.out + run.err
        rows = (run.folder / "metrics.jsonl").read_text().splitlines()
        return json.loads((run.folder / "result.json").read_text())["metrics"] | {
            key: value for row in rows for key, value in json.loads(row).items()
        }

    made = []
    return run


def two(strategy):
    return (f"strategy={strategy}", "trainer.devices=2", "strategy.timeout_s=60")


def test_sums_count_each_sample_once(values):
    found = values(*GPT, *SUMS, *two("pipeline"))
    assert {name: found[name] for name in COUNTS} == COUNTS


def test_data_ranks_add_up_in_sums(values):
    found = values(*GPT, *SUMS, *two("fsdp"), "data.batch_size=2")
    assert {name: found[name] for name in COUNTS} == COUNTS


@pytest.mark.parametrize("limit", ["0.4"])
def test_a_limited_evaluation_reads_the_same_set_on_any_number_of_ranks(limit, values):
    words = (*GPT, "task=validate", f"trainer.limit_val_batches={limit}")
    alone, shared = values(*words)["val/loss"], values(*words, *two("ddp"))["val/loss"]
    assert shared == pytest.approx(alone, rel=1e-6)
    assert alone != pytest.approx(values(*GPT, "task=validate")["val/loss"], rel=1e-5)


SEES_ALL = (
    "model=gpt_nano", f"model._target_={OWN}.SeesAll", "~model.d_model", "~model.n_heads",
    "~model.n_layers", "~model.max_seq_len", "~model.dropout", "~model.activation",
)  # fmt: skip


@pytest.mark.parametrize("strategy", ["tensor_parallel"])
def test_padding_never_changes_the_loss_of_a_net_that_sees_all_positions(strategy, values, train):
    expected = values(*SEES_ALL)
    found = values(*SEES_ALL, *two(strategy))
    for name in ("train/loss", "val/loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    run = train(*WORDS, *SEES_ALL, *two(strategy), "data.seq_len=8", tiny=False, name="odd")
    lines = [line for line in (run.out + run.err).splitlines() if line.startswith("error: ")]
    assert run.code == 2 and len(lines) == 1, run.out + run.err
    assert lines[0].startswith(f"error: strategy.name={strategy}: ")


@pytest.mark.parametrize("strategy", ["context_parallel"])
def test_a_causal_net_may_be_evaluated_on_samples_of_another_length(strategy, values):
    words = (*GPT, "data.val.seq_len=8")
    expected, found = values(*words)["val/loss"], values(*words, *two(strategy))["val/loss"]
    assert found == pytest.approx(expected, rel=1e-5)
