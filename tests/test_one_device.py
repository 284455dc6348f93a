"""Strategies of several ranks, on one: they start, and compute what the single device does."""

from __future__ import annotations

import pytest
import torch

OPTIONS = ("logger=csv", "trainer.log_every_n_steps=1", "optimizer.lr=0.01")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_parallel", "pipeline"])
def test_one_rank_computes_what_a_single_device_does(train, name):
    truth = train(*OPTIONS, "strategy=single", name="single")
    run = train(*OPTIONS, f"strategy={name}", name=name)
    assert run.code == 0, run.err
    assert run.losses() == pytest.approx(truth.losses(), rel=1e-5)
    assert run.metrics["val/loss"] == pytest.approx(truth.metrics["val/loss"], rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compile", ["none", "blocks"])
@pytest.mark.parametrize("name", ["single", "fsdp", "tensor_parallel", "pipeline"])
def test_bf16_on_a_gpu_trains_close_to_fp32(train, name, compile):
    truth = train(*OPTIONS, "strategy=single", name="single")
    run = train(
        *OPTIONS, f"strategy={name}", "trainer.accelerator=gpu", "trainer.precision=bf16-mixed",
        f"model.compile={compile}", name=name,
    )  # fmt: skip
    assert run.code == 0, run.err
    assert run.losses() == pytest.approx(truth.losses(), rel=1e-2)  # 8 bits of mantissa
