"""Peak speeds of devices and links, from the data sheets of their makers and from standards.

FLOP/s are those of dense matrices with fp32 accumulation. Headline figures for sparse matrices are
twice as high. GB/s and TB/s are powers of ten. The bandwidth of a link is one-way and is the sum of
all links of one device. The memory of a device is the size that its driver reports: for HBM the
number of the data sheet in GiB, for GDDR with error correction 94 % of this number (nvidia-smi's
figures, thundergolfer.com/blog/nvidia-gpu-memory-capacity).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Link:
    """A connection between devices.

    Attributes:
        name: Name of the link: its key in LINKS, or "gloo" for a measured link of CPUs.
        bytes_per_s: One-way bandwidth of one device, in bytes/s.
        latency_s: Seconds that each message of a ring takes in addition to its bytes.
        source: Standard or data sheet that states the bandwidth.
        wait_s: Seconds that a collective takes longer in a training step than alone, because the
            ranks do not reach the collective at the same time.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    source: str = ""
    wait_s: float = 0.0


class Efficiency(NamedTuple):
    """Fractions of a device's peak FLOP/s that training reaches.

    Attributes:
        matmul: Speed of matrix multiplications, as a fraction of the peak.
        attention: Speed of attention, as a fraction of the speed of matrix multiplications. Masked
            positions count as computed.
    """

    matmul: float
    attention: float


# Efficiency of each GPU generation, fitted to published speeds. `python -m tests.plan_scale` prints
# the remaining errors.
_DEFAULT_EFFICIENCY = Efficiency(0.6, 0.6)  # an assumption, for generations without published runs
_EFFICIENCY = {
    # 39 TFLOP/s of a GPT of 1.2 B: Shoeybi et al. 2019, arXiv:1909.08053.
    "v100": Efficiency(0.55, 0.5),
    # MPT of 125 M to 70 B on 8 to 128 GPUs: llm-foundry, scripts/train/benchmarking/README.md.
    "a100": Efficiency(0.73, 0.76),
    # The same MPT runs on 8 to 64 GPUs, and torchtitan's tables: Llama of 8 B and 70 B on 8 to 256
    # GPUs.
    "h100": Efficiency(0.61, 0.5),
    # Llama of 8 B, bf16, at less than full power: torchao, prototype/mx_formats/README.md.
    "b200": Efficiency(0.37, 0.5),
}
_EFFICIENCY["h200"] = _EFFICIENCY["gh200"] = _EFFICIENCY["h100"]
_EFFICIENCY["gb200"] = _EFFICIENCY["b200"]


@dataclass(frozen=True)
class Device:
    """Memory and speeds of one device. A board with two GPUs counts as two devices.

    Attributes:
        name: Name of the device, which is its key in DEVICES.
        memory_bytes: Memory that the driver reports.
        flops_per_s: Peak FLOP/s of the types that the device has instructions for. The keys are
            torch's names of the types, and "tf32".
        memory_bytes_per_s: Bandwidth of the memory.
        link: Name of the fastest link within a node.
        source: Data sheet of the device.
    """

    name: str
    memory_bytes: float
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link: str
    source: str = ""

    @property
    def efficiency(self) -> Efficiency:
        """Fractions of `flops_per_s` that training reaches."""
        generation = self.name.partition("_")[0]
        return _EFFICIENCY.get(generation, _DEFAULT_EFFICIENCY)


# Latency of each message of a ring, in seconds: hwLat of the protocol Simple in NCCL 2.27,
# src/graph/tuning.cc.
_NVLINK_S, _PCIE_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6
_LANES = "16 lanes x GT/s x 128/130, PCI-SIG base specification"
_IBTA = "4 lanes, InfiniBand roadmap of the IBTA"
# Name, one-way GB/s of one device, latency in seconds, source.
_LINKS = (
    ("pcie3", 15.75, _PCIE_S, _LANES),
    ("pcie4", 31.5, _PCIE_S, _LANES),
    ("pcie5", 63.0, _PCIE_S, _LANES),
    ("nvlink2", 150, _NVLINK_S, "6 links x 25 GB/s, V100 data sheet"),
    ("nvlink3", 300, _NVLINK_S, "12 links x 25 GB/s, A100 data sheet"),
    ("nvlink4", 450, _NVLINK_S, "18 links x 25 GB/s, H100 data sheet"),
    ("nvlink4_bridge", 300, _NVLINK_S, "12 links x 25 GB/s, H100 NVL product brief"),
    ("nvlink5", 900, _NVLINK_S, "18 links x 50 GB/s, Blackwell data sheet"),
    ("infinity_fabric_4", 448, _NVLINK_S, "7 links x 64 GB/s, CDNA 3 white paper"),
    ("infiniband_hdr", 25, _NETWORK_S, f"200 Gbit/s, {_IBTA}"),
    ("infiniband_ndr", 50, _NETWORK_S, f"400 Gbit/s, {_IBTA}"),
    ("infiniband_xdr", 100, _NETWORK_S, f"800 Gbit/s, {_IBTA}"),
    ("ethernet_10", 1.25, _NETWORK_S, "10 Gbit/s, IEEE 802.3ae"),
    ("ethernet_25", 3.125, _NETWORK_S, "25 Gbit/s, IEEE 802.3by"),
    ("ethernet_100", 12.5, _NETWORK_S, "100 Gbit/s, IEEE 802.3ba"),
    ("ethernet_400", 50, _NETWORK_S, "400 Gbit/s, IEEE 802.3bs"),
)
LINKS = {
    name: Link(name, gb_per_s * 1e9, latency_s, source)
    for name, gb_per_s, latency_s, source in _LINKS
}

_TYPES = "float32", "tf32", "float16", "bfloat16"
# Name, words of the driver's name, GiB, TB/s, link, TFLOP/s in the order of _TYPES (0: the device
# has no instructions for the type), data sheet. A device is the first row with all its words in the
# driver's name. Rows with more words therefore come before rows with fewer words.
_DEVICES = (
    ("v100_pcie_32gb", "V100 PCIE 32GB", 32, 0.9, "pcie3", (14, 0, 112, 0), "V100, 2020"),
    ("v100_pcie", "V100 PCIE", 16, 0.9, "pcie3", (14, 0, 112, 0), "V100, 2020"),
    ("v100_sxm2_32gb", "V100 32GB", 32, 0.9, "nvlink2", (15.7, 0, 125, 0), "V100, 2020"),
    ("v100_sxm2", "V100", 16, 0.9, "nvlink2", (15.7, 0, 125, 0), "V100, 2020"),
    ("t4", "T4", 15, 0.32, "pcie3", (8.1, 0, 65, 0), "T4, 2019"),
    ("a10g", "A10G", 22.5, 0.6, "pcie4", (35, 35, 70, 70), "A10G, 2021"),
    ("a10", "A10", 22.5, 0.6, "pcie4", (31.2, 62.5, 125, 125), "A10, 2021"),
    ("a30", "A30", 24, 0.933, "pcie4", (10.3, 82, 165, 165), "A30, 2021"),
    ("a40", "A40", 45, 0.696, "pcie4", (37.4, 74.8, 149.7, 149.7), "A40, 2021"),
    ("a100_pcie_80gb", "A100 80GB PCIe", 80, 1.935, "pcie4", (19.5, 156, 312, 312), "A100, 2022"),
    ("a100_pcie_40gb", "A100 PCIe", 40, 1.555, "pcie4", (19.5, 156, 312, 312), "A100, 2021"),
    ("a100_sxm_80gb", "A100 80GB", 80, 2.039, "nvlink3", (19.5, 156, 312, 312), "A100, 2022"),
    ("a100_sxm_40gb", "A100", 40, 1.555, "nvlink3", (19.5, 156, 312, 312), "A100, 2021"),
    ("l4", "L4", 22.5, 0.3, "pcie4", (30.3, 60, 121, 121), "L4, 2023"),
    ("l40s", "L40S", 45, 0.864, "pcie4", (91.6, 183, 362, 362), "L40S, 2023"),
    ("l40", "L40", 45, 0.864, "pcie4", (90.5, 90.5, 181, 181), "L40, 2022"),
    ("rtx_3090", "RTX 3090", 24, 0.936, "pcie4", (35.6, 35.6, 71, 71), "GA102 white paper"),
    ("rtx_4090", "RTX 4090", 24, 1.008, "pcie4", (82.6, 82.6, 165.2, 165.2), "Ada white paper"),
    ("h100_pcie", "H100 PCIe", 79.6, 2.0, "pcie5", (51, 378, 756, 756), "H100, 2023"),
    ("h100_nvl", "H100 NVL", 93.6, 3.9, "nvlink4_bridge", (60, 417, 835, 835), "H100, 2024"),
    ("h100_sxm", "H100", 79.6, 3.35, "nvlink4", (67, 494, 989, 989), "H100, 2023"),
    ("gh200", "GH200", 95.6, 4.0, "nvlink4", (67, 494, 989, 989), "GH200, 2023"),
    ("h200_nvl", "H200 NVL", 140.4, 4.8, "nvlink4", (60, 417, 835, 835), "H200, 2024"),
    ("h200", "H200", 140.4, 4.8, "nvlink4", (67, 494, 989, 989), "H200, 2024"),
    ("gb200", "GB200", 185, 8.0, "nvlink5", (80, 1250, 2500, 2500), "GB200 NVL72, 2024"),
    ("b200", "B200", 179, 7.7, "nvlink5", (80, 1100, 2250, 2250), "HGX B200, 2025"),
    ("mi300x", "MI300X", 192, 5.3, "infinity_fabric_4", (163.4, 653.7, 1307, 1307), "MI300X, 2023"),
)
# A driver's name with one of these words is not in the table: a MIG slice, a slower variant of a
# device in the table, or a card without NVLink.
_NOT_IN_TABLE = {"MIG", "LAPTOP", "MOBILE", "MAX", "D", "FHHL"}
DEVICES = {
    name: Device(
        name,
        gib * 2**30,
        {dtype: peak * 1e12 for dtype, peak in zip(_TYPES, tflops, strict=True) if peak},
        tb_per_s * 1e12,
        link,
        f"data sheet, {sheet}",
    )
    for name, _, gib, tb_per_s, link, tflops, sheet in _DEVICES
}


def device_of(driver_name: str) -> Device | None:
    """Return memory and speeds of a GPU by its driver's name, or None if it is not in the table.

    A slice of a GPU (MIG), a laptop's GPU and other slower variants are not in the table.

    Args:
        driver_name: Name that nvidia-smi or `torch.cuda.get_device_name` reports.
    """
    words = set(re.split(r"[\s_-]+", driver_name.upper()))
    if words & _NOT_IN_TABLE:
        return None
    matches = (row[0] for row in _DEVICES if set(row[1].upper().split()) <= words)
    return DEVICES.get(next(matches, ""))
