"""Every strategy on one device computes what strategy=single computes."""

import pytest
import runs as helpers
import torch

ALL = ["single", "fsdp", "tensor_parallel", "pipeline"]


def on_one(runs, name, accelerator, *words):
    return runs(f"strategy={name}", f"trainer.accelerator={accelerator}", *words)


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ALL)
def test_one_rank_equals_a_single_device(name, accelerator, runs):
    run = on_one(runs, name, accelerator, "trainer.max_steps=4", "trainer.precision=32-true")
    rtol = helpers.RTOL if accelerator == "cpu" else 1e-4  # CUDA kernels sum in another order
    helpers.check_losses(run, helpers.plain(runs, "single"), rtol)


@pytest.mark.parametrize("name", ALL)
def test_bf16_true_keeps_the_weights_in_bf16(name, runs):
    run = on_one(runs, name, "cpu", "trainer.precision=bf16-true", "trainer.max_steps=1")
    assert run.record()["weight"].dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["none", "blocks"])
@pytest.mark.parametrize("name", ALL)
def test_bf16_on_a_gpu_trains_close_to_fp32(name, compile, runs):
    words = ("trainer.precision=bf16-mixed", f"model.compile={compile}")
    run, truth = on_one(runs, name, "cuda", *words), helpers.plain(runs, "single")
    # bf16 has 8 bits of mantissa.
    helpers.check_close(run.column("train/loss"), truth.column("train/loss"), 1e-2)
