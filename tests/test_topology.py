"""The links of a node are read from what nvidia-smi prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gptrain.costs.topology import find_islands, parse_topology, slowest_ring_link

FOLDER = Path(__file__).parent / "topologies"
ALL = list(range(8))
# File -> groups for tensor parallelism, the slowest link of a ring.
GOLDEN = {
    # Each GPU has six links: two to two neighbours, one to two; a ring of double links exists.
    "v100_hybrid_mesh": ([[0, 1, 2, 3], [4, 5, 6, 7]], "NV2"),
    "a100_nvswitch": ([ALL], "NV12"),
    "h100_nvswitch": ([ALL], "NV18"),
    "pcie_box": ([[gpu] for gpu in ALL], "SYS"),
    "pairs": ([[0, 1], [2, 3]], "PXB"),
    "mig": ([[0], [1]], "NODE"),  # a GPU in slices has no NVLink
}


def with_spaces_without_legend(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text.partition("\nLegend")[0]).expandtabs(12)


def underlined_from_windows(text: str) -> str:
    lines = (f"\x1b[4m{line}\x1b[0m\x1b[K\r\n" for line in text.splitlines())
    return "$ nvidia-smi topo -m\r\n\r\n" + "".join(lines)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_matrix_is_read_however_it_was_copied(name):
    text = (FOLDER / f"{name}.txt").read_text()
    for copied in (text, with_spaces_without_legend(text), underlined_from_windows(text)):
        links = parse_topology(copied)
        assert (find_islands(links), slowest_ring_link(links)) == GOLDEN[name]


def test_gpus_and_columns_may_come_in_any_order():
    text = """
            NIC0  GPU3  GPU1  GPU10  CPU Affinity  NUMA Affinity
    GPU10   SYS   NV4   SYS   X      0-7           0
    GPU1    PIX   NV4   X     SYS    0-7           0
    GPU3    PHB   X     NV4   NV4    0-7           0
    NIC0    X     PHB   PIX   SYS
    """
    links = parse_topology(text)
    assert links[1, 3] == links[10, 3] == "NV4"
    assert links[1, 10] == slowest_ring_link(links) == "SYS"  # three need all three
    assert find_islands(links) == [[1, 3], [10]]


@pytest.mark.parametrize(
    "text",
    [
        "loss 3.2\n",
        "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\n",
        *((FOLDER / f"{name}.txt").read_text() for name in ("no_gpu", "no_driver", "only_nics")),
    ],
)
def test_a_text_without_a_complete_matrix_is_an_error(text):
    with pytest.raises(ValueError, match="matrix"):
        parse_topology(text)
