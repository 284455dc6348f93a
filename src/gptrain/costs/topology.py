"""How the GPUs of a node are wired, by `nvidia-smi topo -m`, and what follows for a run.

NV# is a bond of # NVLinks. All else goes over PCIe, each word slower than the one before: PIX one
bridge, PXB several, PHB the host bridge, NODE between host bridges, SYS (once SOC) between sockets.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_GPU = re.compile(r"GPU\d+").fullmatch
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # nvidia-smi underlines the header


@dataclass(frozen=True)
class Topology:
    """GPUs by nvidia-smi's numbers, and the link from each to each other."""

    gpus: tuple[int, ...]
    links: dict[tuple[int, int], str]

    @property
    def islands(self) -> list[list[int]]:
        """GPUs that NVLinks join, directly or through others; without NVLink each is its own."""
        islands: list[list[int]] = []
        for gpu in self.gpus:
            near = [one for one in islands if any(speed(self.links[gpu, o]) > 0 for o in one)]
            islands = [island for island in islands if island not in near]
            islands.append(sorted(sum(near, [gpu])))
        return sorted(islands)

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Groups for tensor parallelism: each GPU has NVLinks to every other of its group."""
        groups: list[list[int]] = []
        for gpu in self.gpus:
            near = (one for one in groups if all(speed(self.links[gpu, o]) > 0 for o in one))
            if group := next(near, None):
                group.append(gpu)
            else:
                groups.append([gpu])
        return groups

    @property
    def slowest_ring_link(self) -> str | None:
        """The slowest link of the best ring through all GPUs; None for fewer than two."""
        words = sorted(set(self.links.values()), key=speed, reverse=True)
        return next((w for w in words if self._has_ring(speed(w), self.gpus[:1])), None)

    def _has_ring(self, least: int, path: tuple[int, ...]) -> bool:
        """Whether links of at least this speed lead on from the path, through all others, back."""
        left = [gpu for gpu in self.gpus if gpu not in path]
        near = [gpu for gpu in left or path[:1] if speed(self.links[path[-1], gpu]) >= least]
        return any(not left or self._has_ring(least, (*path, gpu)) for gpu in near)


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
    rows = {line[0]: line[1:] for line in reversed(lines) if "X" in line}
    heads = (line for line in lines if "X" not in line)
    columns = next((head for head in heads if any(map(_GPU, head))), [])
    gpus = sorted(int(word[3:]) for word in columns if _GPU(word))
    if not gpus and text.strip() and not re.search(r"(?i)nvidia|nvml|no devices|\bX\b", text):
        raise ValueError("no matrix as `nvidia-smi topo -m` prints it")
    pairs = permutations(gpus, 2)
    try:
        links = {(a, b): rows[f"GPU{a}"][columns.index(f"GPU{b}")] for a, b in pairs}
    except LookupError:
        raise ValueError("half a matrix: GPUs of its first line have no row or column") from None
    return Topology(tuple(gpus), links)


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
