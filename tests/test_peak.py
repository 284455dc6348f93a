"""The peak speed of a device: that of its data sheet, or measured."""

from __future__ import annotations

import pytest
import torch

from gptrain.lit.measure import find_peak, measure_matmul


def test_measuring_the_peak_does_not_change_the_runs_random_numbers():
    state = torch.get_rng_state()
    assert measure_matmul(torch.device("cpu"), torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gpu_of_the_table_has_the_peak_of_its_data_sheet(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    flops_per_s, text = find_peak(torch.device("cuda", 0), "32-true")
    assert flops_per_s == pytest.approx(989e12, rel=1e-3)
    assert text == "peak 989 TFLOP/s (data sheet, 16 bit)"
