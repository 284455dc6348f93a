"""Strategies of several ranks, on one: they start, and compute what the single device does."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import strategy_cases as cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"
))]  # fmt: skip
ALL = ["single", "fsdp", "tensor_parallel", "pipeline"]


@pytest.fixture
def alone():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def truth():
    return cases.fit("single", n_ranks=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ALL)
def test_one_rank_computes_what_a_single_device_does(name, device, truth, alone):
    run = cases.fit(name, n_ranks=1, device=device, microbatches=2)
    rtol = 1e-5 if device == "cpu" else 1e-4  # other kernels, other sums
    cases.assert_close(run.losses, truth.losses, rtol)
    cases.assert_close([run.val_loss], [truth.val_loss], rtol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compile", ["none", "blocks"])
@pytest.mark.parametrize("name", ALL)
def test_bf16_on_a_gpu_trains_close_to_fp32(name, compile, truth, alone):
    run = cases.fit(
        name, n_ranks=1, device="cuda", microbatches=2, precision="bf16-mixed", compile=compile
    )
    cases.assert_close(run.losses, truth.losses, 1e-2)  # 8 bits of mantissa
