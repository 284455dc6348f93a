"""The table of devices and links against the arithmetic of their standards."""

from __future__ import annotations

import json
import os

import pytest
import torch

from gptrain.costs import machine as module
from gptrain.costs.hardware import DEVICES, LINKS, device_of
from gptrain.costs.machine import THREADS, DamagedMeasurementError, machine_of, this_machine
from gptrain.runtime import measure


def test_links_have_the_arithmetic_of_their_standards():
    """Sixteen lanes with 2 of 130 bits for the code; data sheets add both ways; names are bits."""
    for name, transfers_per_s in (("pcie3", 8e9), ("pcie4", 16e9), ("pcie5", 32e9)):
        bytes_per_s = 16 * transfers_per_s * 128 / 130 / 8
        assert LINKS[name].bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    for name, both_ways in (("nvlink2", 300e9), ("nvlink4", 900e9)):
        assert 2 * LINKS[name].bytes_per_s == both_ways
    for name, bits in (("hdr", 200e9), ("ndr", 400e9), ("xdr", 800e9)):
        assert LINKS[f"infiniband_{name}"].bytes_per_s == bits / 8


def test_every_row_has_a_source_and_the_arithmetic_of_tensor_cores():
    """16 bits are twice as fast as tf32; what a device cannot do is not in its row."""
    assert all(link.source and link.latency_s > 0 for link in LINKS.values())
    for device in DEVICES.values():
        flops = device.flops_per_s
        assert device.link in LINKS and device.source
        if "tf32" in flops:
            assert flops["float16"] == pytest.approx(2 * flops["tf32"], rel=0.03), device.name
        assert flops.get("bfloat16", flops["float16"]) == flops["float16"]
    for name, tflops in {"b200": 2250, "h100_sxm": 989, "a100_sxm_80gb": 312, "t4": 65}.items():
        assert DEVICES[name].flops_per_s["float16"] == tflops * 1e12
    assert "bfloat16" not in DEVICES["v100_sxm2"].flops_per_s
    assert "tf32" not in DEVICES["t4"].flops_per_s


@pytest.mark.parametrize(
    "driver, name",
    [
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("A100-PCIE-40GB", "a100_pcie_40gb"),
        ("Tesla V100-SXM2-16GB", "v100_sxm2"),
        ("Tesla V100-SXM2-32GB", "v100_sxm2_32gb"),
        ("Tesla V100-PCIE-16GB", "v100_pcie"),
        ("Tesla V100-PCIE-32GB", "v100_pcie_32gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        # Not in the table, or a part of what is there.
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Tesla V100-FHHL-16GB", None),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_gives(driver, name):
    assert device_of(driver) is DEVICES.get(name)


def test_a_gpu_has_the_peak_of_its_data_sheet_and_an_unknown_one_is_measured(monkeypatch):
    speeds = {torch.float16: 7e12, torch.bfloat16: 7e12}
    monkeypatch.setattr(measure, "measure_matmul", lambda device, dtype: speeds[dtype])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Z1")
    gpu = torch.device("cuda", 0)
    for precision, dtype in (("16-mixed", "float16"), ("bf16-true", "bfloat16")):
        assert str(measure.find_peak(gpu, precision)) == f"peak 7 TFLOP/s (measured, {dtype})"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert str(measure.find_peak(gpu, "32-true")) == "peak 989 TFLOP/s (data sheet, 16 bit)"


def test_a_node_has_the_part_of_its_data_sheets_that_training_reaches():
    """A V100 loses 1 of 16 GiB to the CUDA context, and has no instructions for bf16."""
    node = machine_of(DEVICES["v100_sxm2"], 8, network=LINKS["ethernet_100"])
    assert (node.n_local, node.memory_bytes, node.has_bf16) == (8, 15 * 2**30, False)
    assert node.flops_per_s["float16"] == 0.55 * DEVICES["v100_sxm2"].flops_per_s["float16"]
    assert node.memory_bytes_per_s == 0.8 * 0.9e12
    assert (node.link.name, node.link.bytes_per_s) == ("nvlink2", 0.8 * 150e9)
    assert (node.network.name, node.network.bytes_per_s) == ("ethernet_100", 0.8 * 12.5e9)
    assert machine_of(DEVICES["h100_sxm"], 8).has_bf16


def test_a_cpu_that_was_not_measured_has_no_speed_and_its_cores_count(tmp_path):
    one_rank, many_ranks = this_machine(tmp_path, 1), this_machine(tmp_path, 10**6)
    assert not one_rank.is_measured and "--measure" in one_rank.source
    assert one_rank.flops_per_s["float32"] >= many_ranks.flops_per_s["float32"]


MEASURED = {
    "threads": 1, "flops_per_s": {"float32": 1e11}, "memory_bytes_per_s": 1e10, "op_s": 1e-6,
    "links": {"gloo": {"2": {"latency_s": 1e-4, "bytes_per_s": 1e9, "wait_s": 0}}},
}  # fmt: skip


def test_a_measured_cpu_has_the_link_of_its_ranks_and_the_speed_of_their_threads(
    tmp_path, monkeypatch
):
    """The bandwidth was measured with all eight cores, the speed with one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    links = {str(n): {"latency_s": 1e-4, "bytes_per_s": n * 1e9, "wait_s": 0} for n in (2, 4)}
    text = json.dumps(MEASURED | {"links": {"gloo": links}})
    (tmp_path / "machine.json").write_text(text)
    for n_ranks, n_threads, has_bf16 in ((2, 4, True), (4, 2, False)):
        monkeypatch.setattr(module, "cpu_has_bf16", lambda has_bf16=has_bf16: has_bf16)
        machine = this_machine(tmp_path, n_ranks)
        assert (machine.name, machine.n_local, machine.op_s) == ("8 cores", n_ranks, 1e-6)
        assert (machine.source, machine.has_bf16) == (str(tmp_path / "machine.json"), has_bf16)
        assert machine.is_measured and machine.link.bytes_per_s == n_ranks * 1e9
        assert machine.flops_per_s["float32"] == pytest.approx(1e11 * n_threads**THREADS)
        assert machine.memory_bytes_per_s == pytest.approx(1e10 * (n_threads / 8) ** THREADS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")  # of the outer and the inner loops
    assert this_machine(tmp_path, 2).flops_per_s["float32"] == 1e11
    # A measurement of one rank has no link, and one of other ranks counts as well as it can.
    assert this_machine(tmp_path, 3).link.bytes_per_s == 2e9
    (tmp_path / "machine.json").write_text(json.dumps(MEASURED | {"links": {"gloo": {}}}))
    assert this_machine(tmp_path, 2).link.wait_s == 2.5e-3


WRONG = [
    *({"op_s": value} for value in (0, -1, "x", float("nan"), None)),
    *({"flops_per_s": value} for value in ([1], {}, {"float32": 0})),
    *({"links": value} for value in ([], {"gloo": []}, {"gloo": {"2": {"speed": 1}}})),
]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["", "[]", "a folder", *(json.dumps(MEASURED | damage) for damage in WRONG)],
    ids=range(3 + len(WRONG)),
)
def test_a_damaged_measurement_is_named(text, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(text) if text != "a folder" else path.mkdir()
    with pytest.raises(DamagedMeasurementError, match=r"machine\.json: damaged .*; try: python -m"):
        this_machine(tmp_path, 1)
