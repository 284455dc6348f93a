"""Parses the links between the GPUs of a node that `nvidia-smi topo -m` prints.

"NV4" stands for 4 bonded NVLinks. All other words stand for PCIe, from fast to slow: PIX through
one bridge, PXB through several bridges, PHB through the host bridge, NODE between host bridges, and
SYS (in old versions SOC) between CPU sockets.
"""

import re
from contextlib import suppress
from itertools import permutations

Links = dict[tuple[int, int], str]  # word of nvidia-smi for each ordered pair of GPUs
_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
_GPU = re.compile(r"GPU\d+").fullmatch
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # nvidia-smi underlines the header


def speed(link: str) -> int:
    """Return a number by which links compare, higher for a faster link, from nvidia-smi's word.

    It is the number of NVLinks, 4 for "NV4"; below 0 for PCIe, such as "PHB"; and lowest for an
    unknown word.
    """
    if link.startswith("NV") and link[2:].isdigit():
        return int(link[2:])
    return -1 - _PCIE.index(link) if link in _PCIE else -1 - len(_PCIE)


def find_islands(links: Links) -> list[list[int]]:
    """Divide the GPUs of a node, by index, into groups for tensor parallelism.

    Each GPU of a group has NVLinks to all others of the group. A GPU without NVLinks is alone.

    Args:
        links: Result of `parse_topology`. An empty dict gives [].
    """
    islands: list[list[int]] = []
    for gpu in sorted({gpu for gpu, _ in links}):
        linked = [group for group in islands if all(speed(links[gpu, peer]) > 0 for peer in group)]
        if linked:
            linked[0].append(gpu)
        else:
            islands.append([gpu])
    return islands


def slowest_ring_link(links: Links) -> str | None:
    """Return the word of nvidia-smi for the slowest link of the fastest ring through all GPUs.

    Returns None if `links`, the result of `parse_topology`, is empty.
    """
    gpus = sorted({gpu for gpu, _ in links})

    def has_ring(min_speed: int, path: list[int]) -> bool:
        """Return whether a path can be completed to a ring of links of at least `min_speed`."""
        remaining = [gpu for gpu in gpus if gpu not in path]
        candidates = remaining or path[:1]  # the last link leads back to the first GPU
        reachable = [gpu for gpu in candidates if speed(links[path[-1], gpu]) >= min_speed]
        if not remaining:
            return bool(reachable)
        return any(has_ring(min_speed, [*path, gpu]) for gpu in reachable)

    words = sorted(set(links.values()), key=speed, reverse=True)
    return next((word for word in words if has_ring(speed(word), gpus[:1])), None)


def parse_topology(text: str) -> Links:
    """Return (GPU, other GPU) -> word of nvidia-smi, such as "NV4", of all pairs in both orders.

    `text` is the output of `nvidia-smi topo -m`. NICs and MIG slices are left out, and the first
    matrix in the text counts. The result is empty for a single GPU.

    Raises:
        ValueError: If the text has no complete matrix.
    """
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    rows = {line[0]: line[1:] for line in reversed(lines) if "X" in line}
    headers = [line for line in lines if "X" not in line and any(map(_GPU, line))]
    with suppress(LookupError):
        columns = headers[0]
        pairs = permutations(sorted(int(word[3:]) for word in columns if _GPU(word)), 2)
        return {(a, b): rows[f"GPU{a}"][columns.index(f"GPU{b}")] for a, b in pairs}
    raise ValueError("the text has no complete matrix like that of `nvidia-smi topo -m`")
