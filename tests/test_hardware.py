"""The table of devices and links against the arithmetic of their standards."""

from __future__ import annotations

import json

import pytest

from gptrain.costs.hardware import DEVICES, LINKS, device_of
from gptrain.costs.speed import DamagedMeasurement, this_machine


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
    assert "bfloat16" not in DEVICES["v100_sxm2"].flops_per_s
    assert "tf32" not in DEVICES["t4"].flops_per_s


@pytest.mark.parametrize(
    "driver, name, peak",
    [
        ("NVIDIA B200", "b200", 2250e12),
        ("NVIDIA GB200", "gb200", 2500e12),
        ("NVIDIA GH200 480GB", "gh200", 989e12),
        ("NVIDIA H200", "h200", 989e12),
        ("NVIDIA H200 NVL", "h200_nvl", 835e12),
        ("NVIDIA H100 80GB HBM3", "h100_sxm", 989e12),
        ("NVIDIA H100 PCIe", "h100_pcie", 756e12),
        ("NVIDIA H100 NVL", "h100_nvl", 835e12),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb", 312e12),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb", 312e12),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb", 312e12),
        ("A100-PCIE-40GB", "a100_pcie_40gb", 312e12),
        ("Tesla V100-SXM2-16GB", "v100_sxm2", 125e12),
        ("Tesla V100-SXM2-32GB", "v100_sxm2_32gb", 125e12),
        ("Tesla V100-PCIE-16GB", "v100_pcie", 112e12),
        ("Tesla V100-PCIE-32GB", "v100_pcie_32gb", 112e12),
        ("NVIDIA A10G", "a10g", 70e12),
        ("NVIDIA A10", "a10", 125e12),
        ("NVIDIA L4", "l4", 121e12),
        ("NVIDIA L40S", "l40s", 362e12),
        ("Tesla T4", "t4", 65e12),
        ("NVIDIA GeForce RTX 4090", "rtx_4090", 165.2e12),
        ("AMD Instinct MI300X", "mi300x", 1307e12),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_gives(driver, name, peak):
    assert device_of(driver) is DEVICES[name]
    assert DEVICES[name].flops_per_s["float16"] == peak


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA GeForce GTX 1080",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Tesla V100-FHHL-16GB",
    ],
)
def test_a_slice_of_a_device_and_an_unknown_one_have_no_row(driver):
    assert device_of(driver) is None


def test_a_cpu_that_was_not_measured_has_no_speed_and_its_cores_count(tmp_path):
    one, many = this_machine(tmp_path, 1), this_machine(tmp_path, 10**6)
    assert not one.is_measured and "--measure" in one.source
    assert one.flops_per_s["float32"] >= many.flops_per_s["float32"]


MEASURED = {
    "threads": 1, "flops_per_s": {"float32": 1e11}, "memory_bytes_per_s": 1e10, "op_s": 1e-6,
    "links": {"gloo": {"2": {"latency_s": 1e-4, "bytes_per_s": 1e9, "wait_s": 0}}},
}  # fmt: skip
WRONG = [
    *({"op_s": value} for value in (0, -1, "x", float("nan"), None)),
    *({"flops_per_s": value} for value in ([1], {}, {"float32": 0})),
    *({"links": value} for value in ([], {"gloo": []}, {"gloo": {"2": {"speed": 1}}})),
]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "[]", *(json.dumps(MEASURED | one) for one in WRONG)], ids=range(2 + len(WRONG))
)
def test_a_damaged_measurement_is_named(text, tmp_path):
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(DamagedMeasurement, match=r"machine\.json: damaged .*; try: python -m"):
        this_machine(tmp_path, 1)
