"""Peak speeds of devices and links, from the data sheets of their makers and from standards.

FLOP/s are those of dense matrices with fp32 accumulation. Headline figures for sparse matrices are
twice as high. GB/s and TB/s are powers of ten. The bandwidth of a link is one-way and is the sum of
all links of one device. The memory of a device is the size that its driver reports: for HBM the
number of the data sheet in GiB, for GDDR with error correction 94 % of this number (nvidia-smi's
figures, thundergolfer.com/blog/nvidia-gpu-memory-capacity).
"""

import os
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

_BANDWIDTH = 0.8  # fraction of the bandwidth on a data sheet that training reaches
# Memory of a GPU that tensors cannot use: the CUDA context, workspaces of cuBLAS and NCCL.
_CONTEXT_BYTES = 2**30


class Link(NamedTuple):
    """A connection between devices.

    Attributes:
        name: Name of the link, such as "nvlink4".
        bytes_per_s: One-way bandwidth of one device that training reaches.
        latency_s: Seconds per message, in addition to the time of its bytes.
    """

    name: str
    bytes_per_s: float
    latency_s: float


# Seconds of each message of a ring, hwLat of the protocol Simple in NCCL 2.27, graph/tuning.cc, and
# one-way GB/s of one device. PCIe: 16 lanes x GT/s x 128/130. NVLink: 25 GB/s for each of 6, 12
# or 18 links, 50 GB/s for Blackwell's. Infinity Fabric: 7 links x 64 GB/s, CDNA 3 white paper.
_LINKS = (
    (5.7e-6, {"pcie3": 15.75, "pcie4": 31.5, "pcie5": 63.0}),
    (3.4e-6, {"nvlink2": 150, "nvlink3": 300, "nvlink4": 450, "nvlink4_bridge": 300,
              "nvlink5": 900, "infinity_fabric_4": 448}),
    (14e-6, {"infiniband_hdr": 25, "infiniband_ndr": 50, "infiniband_xdr": 100}),
    (14e-6, {"ethernet_10": 1.25, "ethernet_25": 3.125, "ethernet_100": 12.5, "ethernet_400": 50}),
)  # fmt: skip
LINKS = {
    name: Link(name, _BANDWIDTH * gb * 1e9, s) for s, links in _LINKS for name, gb in links.items()
}

# Fractions of the peak that training reaches, for each GPU generation: of the FLOP/s in matrix
# multiplications, and of their speed in attention, whose masked positions count as computed. All
# are fitted to published speeds. `python -m tests.tools.plan_scale` prints the remaining errors.
# V100: 39 TFLOP/s of a GPT of 1.2 B, Shoeybi et al. 2019, arXiv:1909.08053.
_VOLTA = (0.55, 0.5)
# A100: MPT of 125 M to 70 B on 8 to 128 GPUs, llm-foundry, scripts/train/benchmarking/README.md.
_AMPERE = (0.72, 0.76)
# H100: the same MPT runs on 8 to 64 GPUs, and torchtitan's tables: Llama of 8 B and 70 B.
_HOPPER = (0.61, 0.5)
# B200: Llama of 8 B, bf16, at less than full power: torchao, prototype/mx_formats/README.md.
_BLACKWELL = (0.37, 0.5)
_REST = (0.6, 0.6)  # an assumption, for generations without published runs
_TYPES = "float32", "tf32", "float16", "bfloat16"
# The table of GPUs. A board with two GPUs counts as two devices. Columns: name, words of the name
# that the driver reports, GiB, TB/s, fastest link within a node, peak TFLOP/s of each of _TYPES (0:
# no instructions for the type), fractions that training reaches, data sheet. `device_of` takes the
# first row with all its words in the driver's name. Rows with more words therefore come before rows
# with fewer words.
_A100, _H100, _H100_NVL = (19.5, 156, 312, 312), (67, 494, 989, 989), (60, 417, 835, 835)
DEVICES: dict[str, Any] = {
    "v100_sxm2_32gb": ("V100 SXM2 32GB", 32, 0.9, "nvlink2", (15.7, 0, 125, 0), _VOLTA, "2020"),
    "v100_sxm2": ("V100 SXM2", 16, 0.9, "nvlink2", (15.7, 0, 125, 0), _VOLTA, "2020"),
    "t4": ("T4", 15, 0.32, "pcie3", (8.1, 0, 65, 0), _REST, "T4, 2019"),
    "a10g": ("A10G", 22.5, 0.6, "pcie4", (35, 35, 70, 70), _REST, "A10G, 2021"),
    "a10": ("A10", 22.5, 0.6, "pcie4", (31.2, 62.5, 125, 125), _REST, "A10, 2021"),
    "a100_pcie_80gb": ("A100 80GB PCIe", 80, 1.935, "pcie4", _A100, _AMPERE, "A100, 2022"),
    "a100_pcie_40gb": ("A100 PCIe", 40, 1.555, "pcie4", _A100, _AMPERE, "A100, 2021"),
    "a100_sxm_80gb": ("A100 80GB", 80, 2.039, "nvlink3", _A100, _AMPERE, "A100, 2022"),
    "a100_sxm_40gb": ("A100", 40, 1.555, "nvlink3", _A100, _AMPERE, "A100, 2021"),
    "l4": ("L4", 22.5, 0.3, "pcie4", (30.3, 60, 121, 121), _REST, "L4, 2023"),
    "l40s": ("L40S", 45, 0.864, "pcie4", (91.6, 183, 362, 362), _REST, "L40S, 2023"),
    "rtx_3090": ("RTX 3090", 24, 0.936, "pcie4", (35.6, 35.6, 71, 71), _REST, "GA102, 2021"),
    "rtx_4090": ("RTX 4090", 24, 1.008, "pcie4", (82.6, 82.6, 165.2, 165.2), _REST, "AD102, 2022"),
    "h100_pcie": ("H100 PCIe", 79.6, 2.0, "pcie5", (51, 378, 756, 756), _HOPPER, "H100, 2023"),
    "h100_nvl": ("H100 NVL", 93.6, 3.9, "nvlink4_bridge", _H100_NVL, _HOPPER, "H100, 2024"),
    "h100_sxm": ("H100", 79.6, 3.35, "nvlink4", _H100, _HOPPER, "H100, 2023"),
    "gh200": ("GH200", 95.6, 4.0, "nvlink4", _H100, _HOPPER, "GH200, 2023"),
    "h200_nvl": ("H200 NVL", 140.4, 4.8, "nvlink4", _H100_NVL, _HOPPER, "H200, 2024"),
    "h200": ("H200", 140.4, 4.8, "nvlink4", _H100, _HOPPER, "H200, 2024"),
    "gb200": ("GB200", 185, 8.0, "nvlink5", (80, 1250, 2500, 2500), _BLACKWELL, "NVL72, 2024"),
    "b200": ("B200", 179, 7.7, "nvlink5", (80, 1100, 2250, 2250), _BLACKWELL, "HGX B200, 2025"),
    "mi300x": ("MI300X", 192, 5.3, "infinity_fabric_4", (163.4, 653.7, 1307, 1307), _REST, "2023"),
}  # fmt: skip
# A driver's name with one of these words is a MIG slice, or a slower variant of a GPU in the table.
_NOT_IN_TABLE = {"MIG", "LAPTOP", "MOBILE", "MAX", "D"}


def device_of(driver_name: str) -> str | None:
    """Return the key in DEVICES of a GPU by its driver's name, or None if it is not in the table.

    A slice of a GPU (MIG), a laptop's GPU and other slower variants are not in the table.

    Args:
        driver_name: Name that nvidia-smi or `torch.cuda.get_device_name` reports.
    """
    words = set(re.split(r"[\s_-]+", driver_name.upper()))
    if words & _NOT_IN_TABLE:
        return None
    rows = (name for name, row in DEVICES.items() if set(row[0].upper().split()) <= words)
    return next(rows, None)


@dataclass(frozen=True)
class Machine:
    """Speeds and memory of the nodes that a run uses.

    Attributes:
        name: Key of DEVICES, or "cpu".
        n_local: Number of ranks on one node.
        memory_bytes: Memory for the tensors of one rank.
        flops_per_s: Speed of matrix multiplications in training, of one rank, by type. The keys are
            torch's names of the types, and "tf32". A type without instructions is missing. Empty
            for a CPU, whose steps are not timed.
        memory_bytes_per_s: Bandwidth of the memory in training, of one rank.
        link: Link between the ranks of one node.
        network: Link between nodes, of each device.
        source: Origin of the figures, for the output of the planner.
        matmul: Fraction of the speeds on the data sheet that `flops_per_s` has.
        attention: Speed of attention, as a fraction of that of matrix multiplications.
        island: Number of devices that `link` joins. It counts only with a `host`.
        host: Link of rings with more devices than `island`. None if `link` joins all devices of a
            node.
    """

    name: str
    n_local: int
    memory_bytes: float
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    link: Link
    network: Link
    source: str = ""
    matmul: float = 1.0
    attention: float = 1.0
    island: int = 0
    host: Link | None = None


def machine_of(
    name: str, n_local: int, link: str | None = None, network: str = "infiniband_ndr"
) -> Machine:
    """Return a node of `n_local` GPUs, with the speeds that training reaches in practice.

    These are fractions of the figures on the data sheets. The memory is that of the data sheet
    without 1 GiB for the CUDA context and the libraries. All GPUs are joined by `link`.

    Args:
        name: Key of DEVICES.
        n_local: Number of GPUs, and of ranks, on the node.
        link: Key of LINKS, the link between the GPUs of a node. None for the device's own.
        network: Key of LINKS, the link between nodes, of each GPU.

    Raises:
        KeyError: If a key is not in its table.
    """
    _, gib, tb_per_s, own_link, tflops, (matmul, attention), sheet = DEVICES[name]
    near, far = LINKS[link or own_link], LINKS[network]
    flops_per_s = {kind: matmul * n * 1e12 for kind, n in zip(_TYPES, tflops, strict=True) if n}
    memory_bytes, bandwidth = gib * 2**30 - _CONTEXT_BYTES, _BANDWIDTH * tb_per_s * 1e12
    source = f"data sheet, {sheet}; {near.name}, {far.name}"
    return Machine(
        name, n_local, memory_bytes, flops_per_s, bandwidth, near, far, source, matmul, attention
    )


def this_cpu(n_local: int) -> Machine:
    """Return the CPU of this machine, whose memory `n_local` ranks share.

    Its `flops_per_s` is empty, and its links and bandwidths have no meaning.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / n_local
    link = Link("gloo", 1.0, 0.0)
    source = "memory as on a GPU, times are not planned"
    return Machine("cpu", n_local, memory_bytes, {}, 1.0, link, link, source)
