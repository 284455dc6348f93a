"""Forbid network connections to other machines in tests."""

from __future__ import annotations

import socket
import sys
from ipaddress import ip_address

_forbidden = False


def forbid_network() -> None:
    """Make every later connection to another machine, or look-up of its name, an error."""
    global _forbidden
    if not _forbidden:
        _forbidden = True
        sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple) -> None:
    if event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        host = args[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    else:
        return
    if not _is_this_machine(host):
        raise PermissionError(f"{event} {host}: tests do not use the network")


def _is_this_machine(host: object) -> bool:
    host = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    try:
        return ip_address(host.partition("%")[0]).is_loopback or host in ("0.0.0.0", "::")
    except ValueError:
        return host in ("localhost", socket.gethostname())
