"""Observe processes from outside: which are alive, and on which addresses they listen."""

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
    """Wait until the condition is true.

    Raises:
        AssertionError: After `timeout_s`, and after two minutes at least, because the machine may
            be busy. The message is what `about` returns.
    """
    give_up = time.monotonic() + max(timeout_s, 120.0)
    while not condition():
        assert time.monotonic() < give_up, about()
        time.sleep(0.05)


def living() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat of all processes except zombies, by process id.

    The fields are in the order of proc(5): name, state, parent, process group, session, and so on.
    """
    processes = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            head, _, rest = path.read_text().rpartition(")")
            if rest.split()[0] not in "ZX":
                processes[int(path.parent.name)] = [head.partition("(")[2], *rest.split()]
    return processes


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    parents = {child: int(fields[2]) for child, fields in living().items()}
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def is_alive(pid: int) -> bool:
    return pid in living()


def listeners(pid: int) -> list[str]:
    """Return the local addresses on which a process listens, in the kernel's hexadecimal form."""
    addresses, sockets = [], set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # TCP_LISTEN
                addresses.append(fields[1].partition(":")[0])
    return addresses
