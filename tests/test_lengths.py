"""Lengths people think in: tokens, shares of a run, optimizer steps, bits per byte."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gptrain.core.errors import ConfigError
from gptrain.core.lengths import (
    BatchPlan,
    RunLengths,
    phase_steps,
    plan_batch,
    plan_lengths,
    token_steps,
)
from gptrain.data import TokenDataset, collate
from gptrain.lit import LanguageModel
from tests.command_line import compose_run


def test_a_share_of_an_unknown_length_and_too_few_tokens_are_refused():
    cfg = compose_run("scheduler.warmup_steps=0.1")
    with pytest.raises(ConfigError, match=r"scheduler\.warmup_steps=0\.1"):
        phase_steps(cfg, "warmup", RunLengths(BatchPlan(1, 1, 1), 16, 1, None, 1))
    assert token_steps("max_tokens", 1000, 100) == token_steps("max_tokens", 1099.5, 100) == 10
    with pytest.raises(ConfigError, match=r"max_tokens=99: .*100 tokens of one step"):
        token_steps("max_tokens", 99, 100)


def test_the_lengths_of_a_run_follow_from_its_samples_and_its_first_limit():
    """100 samples are twelve steps of eight samples, and four samples are left."""
    cfg = compose_run()

    def plan(sample_tokens: int | None = 16, **changes: Any) -> RunLengths:
        keys = {key if key == "max_tokens" else f"trainer.{key}": changes[key] for key in changes}
        return plan_lengths(cfg.changed(keys), BatchPlan(4, 1, 2), 100, sample_tokens)

    by_epochs = plan(max_epochs=3)
    assert (by_epochs.epoch_steps, by_epochs.n_steps, by_epochs.validate_every) == (12, 36, 12)
    assert by_epochs.limit == "trainer.max_epochs=3"
    assert (by_epochs.unit, by_epochs.step_tokens, by_epochs.n_epochs) == ("tokens", 128, 3)
    by_steps = plan(max_steps=13, val_check_interval=99)
    assert by_steps.limit == "trainer.max_steps=13"
    assert (by_steps.n_steps, by_steps.validate_every, by_steps.n_epochs) == (13, 13, 2)
    by_tokens = plan(max_tokens=1000)
    assert (by_tokens.n_steps, by_tokens.limit) == (7, "max_tokens=1000")
    first = plan(max_tokens=1000, max_steps=3, max_epochs=1)  # the earliest of several limits
    assert (first.n_steps, first.limit) == (3, "trainer.max_steps=3")
    tried = plan(fast_dev_run=2)
    assert tried.limit == "trainer.fast_dev_run=true"
    images = plan(sample_tokens=None)
    assert (images.unit, images.sample_tokens, images.step_tokens) == ("samples", 1, 8)
    # A part of the samples, or a number of micro-batches; at least one step.
    for limit, steps in ((0.5, 6), (7, 3), (1, 1), (0.01, 1), (99, 12)):
        assert plan(limit_train_batches=limit).epoch_steps == steps


def test_a_global_batch_size_is_divided_into_micro_steps():
    cfg = compose_run("data.batch_size=4")

    def plan(size: int | None, accumulate: int = 1) -> BatchPlan:
        keys = {"data.global_batch_size": size, "trainer.accumulate_grad_batches": accumulate}
        return plan_batch(cfg.changed(keys), data_parallel_size=3)

    assert plan(24) == BatchPlan(4, 3, accumulate=2)
    assert plan(None, 5) == BatchPlan(4, 3, accumulate=5)
    with pytest.raises(ValueError, match=r"3 ranks x data.batch_size 4; nearest: 24, 36"):
        plan(30)


def test_bits_per_byte_is_eight_for_a_net_that_knows_nothing_whatever_the_tokenizer(tmp_path):
    text = np.random.default_rng(0).integers(0, 256, 402, dtype=np.uint8)
    measured = []
    for name, width in (("bytes", 1), ("pairs of bytes", 2)):
        tokens = text.astype(np.uint16) if width == 1 else text.view("<u2")
        tokens.tofile(tmp_path / name)
        vocab_size = 256**width
        data = TokenDataset(tmp_path / name, 8, "uint16", vocab_size, keep_tail=True)
        net = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 1), torch.nn.Linear(1, vocab_size))
        for parameter in net.parameters():
            torch.nn.init.zeros_(parameter)  # every token is as likely as any other
        module = LanguageModel(
            net, lambda net: None,
            token_bytes=torch.full((vocab_size,), width),
        )  # fmt: skip
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False,
                             enable_checkpointing=False, enable_model_summary=False)  # fmt: skip
        loader = DataLoader(data, batch_size=4, collate_fn=collate)
        (tested,) = trainer.test(module, loader, verbose=False)
        (metrics,) = trainer.validate(module, loader, verbose=False)
        assert metrics["val/loss"] == pytest.approx(width * math.log(256), rel=1e-6)
        assert [*tested] == ["test/loss", "test/perplexity", "test/bits_per_byte"]
        measured.append(float(metrics["val/bits_per_byte"]))
    assert measured == pytest.approx([8.0, 8.0], rel=1e-6)
