"""User datasets: every sample counts once, and unsupported formats are refused in one line."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import random_split

from gptrain.data import as_pairs, load_tokenizer
from tests.lit.fit import DATA, MODULES, TWO, fit
from tests.lit.own.data import Odd, Points


def of(name: str, *more: str) -> tuple[str, ...]:
    """Return the overrides that train and validate on a class of own/data.py, with extra keys."""
    words = [f"data.{part}._target_={DATA}.{name}" for part in ("train", "val")]
    return (*words, *(f"+data.{part}.{option}" for part in ("train", "val") for option in more))


# Every sample is evaluated once


def test_a_plain_module_evaluates_every_sample_once():
    n_samples = 37
    run = fit(
        *of("Points"), f"{MODULES}.Supervised", f"data.val.num_samples={n_samples}",
        *TWO, "data.batch_size=8", "data.val.seed=1",
    )  # fmt: skip
    weights = run.state()["weights"]
    data = Points(n_samples, 17, 256, seed=1)
    outputs = data.points @ weights["module.layer.weight"].T + weights["module.layer.bias"]
    loss = F.cross_entropy(outputs, data.targets)
    accuracy = float((outputs.argmax(1) == data.targets).float().mean())
    assert run.metrics["val/f1"] == pytest.approx(accuracy, abs=1e-6)  # micro: the same
    assert run.metrics["val/seen"] == n_samples
    assert run.metrics["val/loss"] == pytest.approx(float(loss), rel=1e-5)
    # The lines printed at the start describe this module and these data.
    assert run.line("model").endswith("Supervised · 10 parameters")
    batch = run.line("batch")
    assert "= 16 samples per step" in batch
    assert "token" not in batch and " lr " not in batch and "\nplan " not in run.out
    assert " samples/s" in run.line("result") and "tokens/s" not in run.out


# Batches in which every target is ignored (-100)


def test_a_later_step_without_a_target_is_counted_and_repeats_the_previous_loss():
    run = fit(*of("Odd", "kind=some"), "data.batch_size=1", "data.train.num_samples=8", "seed=4")
    losses, norms = run.column("train/loss"), run.column("grad_norm")
    missing = [step for step, norm in enumerate(norms) if norm == 0]
    assert len(missing) == 4 and all(losses[step] == losses[step - 1] for step in missing)
    assert run.out.count("is without a target") == 4


# Sample formats


@pytest.mark.parametrize(
    "kind, module",
    [("dict of int32", "gptrain.lit.LanguageModel"), ("padded", "tests.lit.own.modules.Logs")],
)
def test_hugging_face_dicts_train_like_the_same_pairs(kind, module):
    """Hugging Face labels equal input_ids; each label is predicted from the tokens before it."""
    words = (f"module._target_={module}", "model.max_seq_len=64")
    dicts = fit(*of("Odd", f"kind='{kind}'"), *words)
    pairs = fit(*words)
    assert dicts.column("train/loss") == pytest.approx(pairs.column("train/loss"), rel=1e-5)
    assert dicts.metrics["val/loss"] == pytest.approx(pairs.metrics["val/loss"], rel=1e-5)


def test_pairs_of_dicts_keep_the_tokenizer_and_the_end_token_of_their_dataset():
    dicts = Odd(4, 17, 256, 0, "dict")
    dicts.tokenizer, dicts.end_id = load_tokenizer("bytes"), 255
    dicts.token_bytes, dicts.fingerprint = dicts.tokenizer.token_bytes, "of the dicts"
    pairs = as_pairs(dicts, "data.train")
    assert pairs is not dicts and (pairs.tokenizer, pairs.end_id) == (dicts.tokenizer, 255)
    assert (pairs.token_bytes is dicts.token_bytes) and pairs.fingerprint == "of the dicts"
    with pytest.warns(UserWarning, match="data.val: not used: idx$"):
        as_pairs([{"input_ids": [1], "labels": [1], "idx": 0}], "data.val")
    empty = Odd(0, 17, 256, 0, "dict")
    assert as_pairs(empty, "data.val") is empty


# Streams


def test_a_stream_without_a_state_is_read_again_on_a_resume(tmp_path):
    words = of("Endless")
    run = fit(*words, "data.num_samples=20", "checkpoint.every_n_steps=1", "checkpoint.keep=9")
    losses = run.column("train/loss")
    assert len(losses) == 6 and "is read again up to" in run.line("data")
    copy = run.copy_until(4, tmp_path / "copy")
    again = fit(*words, "data.num_samples=20", "ckpt_path=last", folder=copy)
    assert again.column("train/loss")[-2:] == losses[-2:]


# A LightningDataModule of the user

DATA_MODULE = ("~data", f"+data._target_={DATA}.DataModule", "+data.num_samples=44")
EPOCHS = ("trainer.max_steps=-1", "trainer.max_epochs=2", "checkpoint.every_n_steps=1")


def read_by_ranks(run) -> list[dict]:
    """Return what the DataModule of each rank has printed at its end."""
    lines = [line for line in run.out.splitlines() if line.startswith("datamodule ")]
    return [json.loads(line.removeprefix("datamodule ")) for line in lines]


def test_a_lightning_data_module_trains_validates_and_resumes(tmp_path):
    words = (*DATA_MODULE, *EPOCHS, "+data.n_loaders=2", "seed=5")
    run = fit(*words, "checkpoint.keep=99")
    (read,) = read_by_ranks(run)
    epoch = sorted({*range(44)} - {*read["val"]})
    assert len(epoch) == 35 and read["prepared"]
    torch.manual_seed(5)
    assert read["val"] == sorted(random_split(range(44), [35, 9])[1].indices)
    assert sorted(read["seen"][:35]) == sorted(read["seen"][35:]) == epoch
    assert len(run.column("train/loss")) == 18 and len(run.column("val/loss")) == 2
    assert run.column("tokens")[-1] == 18 * 64
    assert "DataModule · not exact" in run.line("data")
    assert "= 64 tokens per step · 18 steps by trainer.max_epochs=2" in run.line("batch")
    assert "task=validate" in run.line("next")  # the DataModule has no test loader
    again = fit(*words, "ckpt_path=last", folder=run.copy_until(5, tmp_path / "again"))
    (read_again,) = read_by_ranks(again)
    assert read_again["val"] == read["val"] and again.column("step")[-1] == 18
    validated = fit(f"from_run={run.folder}", "task=validate")
    assert validated.line("batch").endswith(" 2 x 1 ranks")  # the first loader counts
    best = min(run.column("val/loss"))
    assert validated.metrics["val/loss"] == pytest.approx(best, rel=1e-6)
    assert {*read["stages"]} == {"fit"}
    assert {*read_by_ranks(validated)[0]["stages"]} == {"validate"}


@pytest.mark.slow
def test_a_lightning_data_module_feeds_the_ranks_of_ddp_different_samples(tmp_path):
    uneven = (*DATA_MODULE, f"data._target_={DATA}.Uneven")
    words = (*TWO, f"{MODULES}.Plain", "trainer.accumulate_grad_batches=2")
    run = fit(*uneven, *EPOCHS, *words)
    ranks = read_by_ranks(run)
    assert ranks[0]["val"] == ranks[1]["val"]  # the ranks split the samples in the same way
    assert sorted(rank["prepared"] for rank in ranks) == [False, True]
    assert ranks[0]["seed"] != ranks[1]["seed"]  # the ranks draw different dropout
    # 35 samples are 18 for each rank, one of them twice: 5 batches, of which 4 fill steps.
    assert [len(rank["seen"]) for rank in ranks] == [2 * 16, 2 * 16]
    assert "the last 1 batches of an epoch fill no step" in run.line("data")
    assert not {*ranks[0]["seen"][:16]} & {*ranks[1]["seen"][:16]}
    assert run.column("step")[-1] == 4
    copy = run.copy_until(1, tmp_path / "again")
    fit(*uneven, *EPOCHS, *words, "ckpt_path=last", folder=copy)
