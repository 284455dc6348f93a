"""The links of a node are read from nvidia-smi and used by the planner."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gptrain.costs.topology import nvidia_smi, parse_topology, read_topology, speed

FOLDER = Path(__file__).parent / "topologies"
ALL = list(range(8))
# File -> islands, groups for tensor parallelism, the slowest link of a ring.
GOLDEN = {
    # Each GPU has six links: two to two neighbours, one to two; a ring of double links exists.
    "v100_hybrid_mesh": ([ALL], [[0, 1, 2, 3], [4, 5, 6, 7]], "NV2"),
    "a100_nvswitch": ([ALL], [ALL], "NV12"),
    "h100_nvswitch": ([ALL], [ALL], "NV18"),
    "pcie_box": ([[gpu] for gpu in ALL], [[gpu] for gpu in ALL], "SYS"),
    "pairs": ([[0, 1], [2, 3]], [[0, 1], [2, 3]], "PXB"),
    "mig": ([[0], [1]], [[0], [1]], "NODE"),  # a GPU in slices has no NVLink
    "no_gpu": ([], [], None),
    "no_driver": ([], [], None),
    "only_nics": ([], [], None),
}


def with_spaces_without_legend(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text.partition("\nLegend")[0]).expandtabs(12)


def underlined_from_windows(text: str) -> str:
    lines = (f"\x1b[4m{line}\x1b[0m\x1b[K\r\n" for line in text.splitlines())
    return "$ nvidia-smi topo -m\r\n\r\n" + "".join(lines)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_matrix_is_read_however_it_was_copied(name, monkeypatch):
    text = (FOLDER / f"{name}.txt").read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert read_topology("-") == parse_topology(text)
    assert read_topology(str(FOLDER / f"{name}.txt")) == parse_topology(text)
    for copied in (text, with_spaces_without_legend(text), underlined_from_windows(text)):
        topology = parse_topology(copied)
        facts = topology.islands, topology.tensor_groups, topology.slowest_ring_link
        assert facts == GOLDEN[name]


def test_every_file_is_golden():
    assert {path.stem for path in FOLDER.iterdir()} == GOLDEN.keys()


def test_gpus_and_columns_may_come_in_any_order():
    text = """
            NIC0  GPU3  GPU1  GPU10  CPU Affinity  NUMA Affinity
    GPU10   SYS   NV4   SYS   X      0-7           0
    GPU1    PIX   NV4   X     SYS    0-7           0
    GPU3    PHB   X     NV4   NV4    0-7           0
    NIC0    X     PHB   PIX   SYS
    """
    topology = parse_topology(text)
    assert topology.gpus == (1, 3, 10)
    assert topology.links[1, 3] == topology.links[10, 3] == "NV4"
    assert topology.links[1, 10] == topology.slowest_ring_link == "SYS"  # three need all three
    assert topology.islands == [[1, 3, 10]]
    assert topology.tensor_groups == [[1, 3], [10]]


def test_one_gpu_is_an_island_without_links():
    topology = parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t\tN/A\n")
    assert (topology.islands, topology.slowest_ring_link) == ([[0]], None)


def test_a_second_matrix_does_not_count():
    peers = "\n \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n"  # output of `topo -p2p rw`
    topology = parse_topology("\tGPU0\tGPU1\nGPU0\tX\tPHB\nGPU1\tPHB\tX\n" + peers)
    assert topology.slowest_ring_link == "PHB"


def test_words_are_ordered_by_speed():
    words = ["NV18", "NV12", "NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
    assert sorted(words, key=speed, reverse=True) == words
    assert speed("what a later driver says") < speed("SYS")


@pytest.mark.parametrize("text", ["loss 3.2\n", "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV4\n"])
def test_a_file_with_no_matrix_or_half_of_one_is_an_error(text, tmp_path):
    (tmp_path / "topo").write_text(text)
    with pytest.raises(ValueError, match="matrix"):
        read_topology(str(tmp_path / "topo"))


def test_a_machine_without_nvidia_smi_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_smi("topo", "-m") == ""
    assert read_topology(None).gpus == ()
    limits = []

    def hang(words, *, timeout, **_):
        limits.append(timeout)
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(subprocess, "check_output", hang)
    assert nvidia_smi("topo", "-m") == "" and limits == [20]  # a driver that hangs
