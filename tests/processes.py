"""Processes of a run seen from outside: who is alive, who listens where; and waiting for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def wait_until(
    condition: Callable[[], object], timeout_s: float, about: Callable[[], str] = str
) -> None:
    """Returns once it is true; else fails with `about`."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, about()
        time.sleep(0.05)


def living() -> dict[int, list[str]]:
    """Processes but for zombies: name, state, parent, group, session and on, of proc(5)."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it is gone
            head, _, rest = path.read_text().rpartition(")")
            if rest.split()[0] not in "ZX":
                found[int(path.parent.name)] = [head.partition("(")[2], *rest.split()]
    return found


def family(pid: int) -> list[int]:
    """A process and all that it has started, directly or not."""
    parents, found = {child: int(fields[2]) for child, fields in living().items()}, [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def is_alive(pid: int) -> bool:
    return pid in living()


def listeners(pid: int) -> list[str]:
    """Local addresses, in the kernel's hexadecimal, on which a process listens."""
    found, sockets = [], set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # TCP_LISTEN
                found.append(fields[1].partition(":")[0])
    return found
