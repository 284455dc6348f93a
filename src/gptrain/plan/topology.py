"""How the GPUs of a node are wired, by `nvidia-smi topo -m`, and what follows for a run.

NV# is a bond of # NVLinks. All else goes over PCIe, each word slower than the one before: PIX one
bridge, PXB several, PHB the host bridge, NODE between host bridges, SYS (once SOC) between sockets.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, takewhile
from pathlib import Path

_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_GPU = re.compile(r"GPU(\d+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # nvidia-smi underlines the header
_AFFINITY = ("CPU", "NUMA", "GPU")  # first words of the columns behind the devices
_OF_NVIDIA = re.compile(r"nvidia|nvml|no devices|\bX\b", re.IGNORECASE)


@dataclass(frozen=True)
class Topology:
    """GPUs by nvidia-smi's numbers, and the link of each pair, its lower number first."""

    gpus: tuple[int, ...]
    links: dict[tuple[int, int], str]

    @property
    def islands(self) -> list[list[int]]:
        """GPUs that NVLinks join, directly or through others; without NVLink each is its own."""
        return self._joined(1)

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Groups for tensor parallelism: each GPU has NVLinks to every other of its group."""
        groups: list[list[int]] = []
        for gpu in self.gpus:
            near = (group for group in groups if all(self._speed(gpu, one) > 0 for one in group))
            group = next(near, [])
            groups = groups if group else [*groups, group]
            group.append(gpu)
        return groups

    @property
    def slowest_ring_link(self) -> str | None:
        """The slowest link of the best ring through all GPUs; None for fewer than two."""
        words = sorted(set(self.links.values()), key=speed, reverse=True)
        return next((word for word in words if self._has_ring(speed(word))), None)

    def to_json(self) -> dict[str, object]:
        """What plan prints with --json."""
        return {"islands": self.islands, "slowest_ring_link": self.slowest_ring_link}

    def _speed(self, one: int, other: int) -> int:
        return speed(self.links[min(one, other), max(one, other)])

    def _joined(self, least: int) -> list[list[int]]:
        """GPUs that links of at least this speed connect."""
        islands: list[list[int]] = []
        for gpu in self.gpus:
            near = [i for i in islands if any(self._speed(gpu, one) >= least for one in i)]
            joined = sorted([gpu, *(one for island in near for one in island)])
            islands = [*(island for island in islands if island not in near), joined]
        return sorted(islands)

    def _has_ring(self, least: int) -> bool:
        """Whether links of at least this speed form a ring through all."""
        first, *rest = self.gpus

        def closes(last: int, left: Collection[int]) -> bool:
            near = [gpu for gpu in left or (first,) if self._speed(last, gpu) >= least]
            return any(not left or closes(gpu, [o for o in left if o != gpu]) for gpu in near)

        return len(self._joined(least)) == 1 and closes(first, rest)


def speed(link: str) -> int:
    """Orders nvidia-smi's words: the number of NVLinks, below 0 for PCIe, least for another."""
    if link.startswith("NV") and link[2:].isdigit():
        return int(link[2:])
    return -1 - _PCIE.index(link) if link in _PCIE else -1 - len(_PCIE)


def parse_topology(text: str) -> Topology:
    """The first matrix in what nvidia-smi printed, without NICs and the slices of MIG.

    Raises: ValueError for half a matrix, and for none where nothing says that there is no GPU.
    """
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    heads = [list(takewhile(lambda word: word not in _AFFINITY, line)) for line in lines]
    columns = next((h for h in heads if any(map(_GPU.fullmatch, h)) and "X" not in h), [])
    names = sorted(filter(_GPU.fullmatch, columns), key=lambda name: int(name[3:]))
    if not names and text.strip() and not _OF_NVIDIA.search(text):
        raise ValueError("no matrix as `nvidia-smi topo -m` prints it")
    rows = {line[0]: line[1:] for line in reversed(lines) if "X" in line}
    links = {}
    for one, other in combinations(names, 2):
        try:
            links[int(one[3:]), int(other[3:])] = rows[one][columns.index(other)]
        except LookupError:
            raise ValueError(f"the matrix says nothing about {one} and {other}") from None
    return Topology(tuple(int(name[3:]) for name in names), links)


def read_topology(source: str | None) -> Topology:
    """From a file, a pipe ("-") or this machine (None). Raises: OSError, ValueError."""
    if source is None:
        return parse_topology(nvidia_smi("topo", "-m"))
    return parse_topology(sys.stdin.read() if source == "-" else Path(source).read_text())


def nvidia_smi(*arguments: str) -> str:
    """What it prints; nothing where there is none, or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["nvidia-smi", *arguments], text=True, timeout=20, stderr=subprocess.DEVNULL
        )
    return ""
