"""Parses the links between the GPUs of a node that `nvidia-smi topo -m` prints.

"NV4" stands for 4 bonded NVLinks. All other words stand for PCIe, from fast to slow: PIX through
one bridge, PXB through several bridges, PHB through the host bridge, NODE between host bridges, and
SYS (in old versions SOC) between CPU sockets.
"""

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
    """The GPUs of a node and the links between them.

    Attributes:
        gpus: Indices of the GPUs in nvidia-smi, in ascending order.
        links: Word of nvidia-smi for the link of each ordered pair of GPUs.
    """

    gpus: tuple[int, ...]
    links: dict[tuple[int, int], str]

    @property
    def islands(self) -> list[list[int]]:
        """Groups of GPUs that NVLinks connect, directly or through another GPU of the group.

        A GPU without NVLink is a group of its own.
        """
        islands: list[list[int]] = []
        for gpu in self.gpus:
            joined = [
                island for island in islands if any(self._has_nvlink(gpu, peer) for peer in island)
            ]
            islands = [island for island in islands if island not in joined]
            islands.append(sorted(sum(joined, [gpu])))
        return sorted(islands)

    @property
    def tensor_groups(self) -> list[list[int]]:
        """Groups for tensor parallelism: each GPU has an NVLink to every other GPU of its group."""
        groups: list[list[int]] = []
        for gpu in self.gpus:
            for group in groups:
                if all(self._has_nvlink(gpu, peer) for peer in group):
                    group.append(gpu)
                    break
            else:
                groups.append([gpu])
        return groups

    @property
    def slowest_ring_link(self) -> str | None:
        """Word of nvidia-smi for the slowest link of the fastest ring through all GPUs.

        None for fewer than two GPUs.
        """
        words = sorted(set(self.links.values()), key=speed, reverse=True)
        first = self.gpus[:1]
        return next((word for word in words if self._has_ring(speed(word), first)), None)

    def _has_nvlink(self, gpu: int, peer: int) -> bool:
        """Return whether two GPUs are linked by NVLink."""
        return speed(self.links[gpu, peer]) > 0

    def _has_ring(self, min_speed: int, path: tuple[int, ...]) -> bool:
        """Return whether a path can be completed to a ring through all GPUs.

        Args:
            min_speed: Lowest speed of the links that the ring may use.
            path: GPUs at the beginning of the ring, in their order.
        """
        remaining = [gpu for gpu in self.gpus if gpu not in path]
        candidates = remaining or path[:1]  # the last link leads back to the first GPU
        reachable = [gpu for gpu in candidates if speed(self.links[path[-1], gpu]) >= min_speed]
        if not remaining:
            return bool(reachable)
        return any(self._has_ring(min_speed, (*path, gpu)) for gpu in reachable)


def speed(link: str) -> int:
    """Return a number that orders the words of nvidia-smi by the speed of their links.

    The number is the number of NVLinks, or negative for PCIe, and lowest for an unknown word.

    Args:
        link: Word of nvidia-smi, such as "NV4" or "PIX".
    """
    if link.startswith("NV") and link[2:].isdigit():
        return int(link[2:])
    return -1 - _PCIE.index(link) if link in _PCIE else -1 - len(_PCIE)


def parse_topology(text: str) -> Topology:
    """Return the topology that `nvidia-smi topo -m` printed, without NICs and MIG slices.

    The first matrix in the text counts. The topology is empty if the text is empty, or if it says
    that there is no GPU.

    Args:
        text: Output of `nvidia-smi topo -m`.

    Raises:
        ValueError: If rows or columns of the matrix are missing, or if the text has no matrix and
            is not a message of nvidia-smi.
    """
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    rows = {line[0]: line[1:] for line in reversed(lines) if "X" in line}
    headers = (line for line in lines if "X" not in line)
    columns = next((header for header in headers if any(map(_GPU, header))), [])
    gpus = sorted(int(word[3:]) for word in columns if _GPU(word))
    if not gpus and text.strip() and not re.search(r"(?i)nvidia|nvml|no devices|\bX\b", text):
        raise ValueError("the text has no matrix like that of `nvidia-smi topo -m`")
    pairs = permutations(gpus, 2)
    try:
        links = {(a, b): rows[f"GPU{a}"][columns.index(f"GPU{b}")] for a, b in pairs}
    except LookupError:
        message = "the matrix is incomplete: a GPU of its first line has no row or no column"
        raise ValueError(message) from None
    return Topology(tuple(gpus), links)


def read_topology(source: str | None) -> Topology:
    """Read the topology of a node.

    Args:
        source: File with the output of `nvidia-smi topo -m`, or "-" for standard input. None runs
            nvidia-smi on this machine.

    Returns:
        The topology. It is empty if `source` is None and nvidia-smi is missing or fails.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the text is no topology (`parse_topology`).
    """
    if source is None:
        return parse_topology(nvidia_smi("topo", "-m"))
    return parse_topology(sys.stdin.read() if source == "-" else Path(source).read_text())


def nvidia_smi(*arguments: str) -> str:
    """Run nvidia-smi and return its output, or an empty string if it is missing or fails.

    It also counts as failed if it takes longer than 20 seconds.

    Args:
        arguments: Words of the command line after `nvidia-smi`.
    """
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            ["nvidia-smi", *arguments], text=True, timeout=20, stderr=subprocess.DEVNULL
        )
    return ""
