"""The start of a process group: all ranks reach one store, or one line names those that do not.

torch reports a rank that never comes as "Wait timeout", as a count of clients, or with the frames
of C++, depending on who waits and where. Here every rank announces itself in the store first.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

REMINDER_S = 30.0  # ranks of one job start within seconds of each other
_POLL_S = 0.5
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class MissingRanksError(Exception):
    """Ranks of the job did not come together; the message names them and the variables."""

    cause = "hang"


def open_store(
    rank: int,
    world_size: int,
    timeout_s: float,
    store_path: str | None = None,
    variables: Sequence[str] = (),
) -> dist.Store:
    """Return a store that all ranks of the job have reached.

    Args:
        timeout_s: Time that ranks may come after the first one.
        store_path: File at which ranks of one node meet. None meets at MASTER_ADDR.
        variables: Names of the environment variables that number the ranks, for the message.

    Raises:
        MissingRanksError: If a rank does not come, or if the address cannot be used.
    """
    end_s = time.monotonic() + timeout_s
    named = describe((*variables, *(() if store_path else _ADDRESS)))
    if store_path:
        store: dist.Store = dist.FileStore(store_path, world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent serves it
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    else:
        store = _open_network_store(rank, world_size, timeout_s, end_s, named)
    _wait_for_all(store, rank, world_size, timeout_s, end_s, named)
    return store


def describe(variables: Sequence[str]) -> str:
    """Return NAME=value of the variables that are set, joined by spaces."""
    return " ".join(f"{name}={os.environ[name]}" for name in variables if name in os.environ)


def _open_network_store(
    rank: int, world_size: int, timeout_s: float, end_s: float, named: str
) -> dist.Store:
    """Return the store at MASTER_ADDR:MASTER_PORT, which rank 0 serves."""
    host, port = os.environ.get(_ADDRESS[0], ""), os.environ.get(_ADDRESS[1], "")
    if not host or not port.strip().isdigit():
        message = "MASTER_ADDR and MASTER_PORT must name the host of rank 0 and a free port of it"
        raise MissingRanksError(f"{named}: {message}")
    number = int(port)
    _wait_for_name(host, timeout_s, end_s, named)
    if rank == 0:
        _check_port_is_free(number, named)
    else:
        _wait_for_server(host, number, timeout_s, end_s, named)
    timeout = timedelta(seconds=max(1.0, end_s - time.monotonic()))
    try:
        return dist.TCPStore(host, number, world_size, rank == 0, timeout, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        said = str(error).splitlines()[0]
        raise MissingRanksError(f"{named}: rank {rank} cannot use this address ({said})") from None


def _wait_for_name(host: str, timeout_s: float, end_s: float, named: str) -> None:
    """Wait until a host name can be resolved: in a cluster the name may be seconds younger."""
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: no label of a domain name
            if time.monotonic() > end_s:
                message = f"MASTER_ADDR={host} is no known host, for {timeout_s:g} s ({error})"
                hint = "the name or address of the host of rank 0"
                raise MissingRanksError(f"{named}: {message}; try: {hint}") from None
        time.sleep(_POLL_S)


def _check_port_is_free(port: int, named: str) -> None:
    """Raise a MissingRanksError if another process of this host listens on a port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            why = "taken by another process" if error.errno == errno.EADDRINUSE else error.strerror
            message = f"MASTER_PORT={port} of this host cannot be used by rank 0: {why}"
            hint = "another MASTER_PORT, the same in all ranks"
            raise MissingRanksError(f"{named}: {message}; try: {hint}") from None
        except OverflowError:
            raise MissingRanksError(f"{named}: MASTER_PORT={port} is no port") from None


def _wait_for_server(host: str, port: int, timeout_s: float, end_s: float, named: str) -> None:
    """Wait until rank 0 listens; torch's own client would print each failed attempt."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OverflowError:
            raise MissingRanksError(f"{named}: MASTER_PORT={port} is no port") from None
        except OSError as error:
            if time.monotonic() > end_s:
                why = error.strerror or str(error)
                message = f"rank 0 did not come within {timeout_s:g} s: no answer there ({why})"
                raise MissingRanksError(f"{named}: {message}; {_hint(named)}") from None
        time.sleep(_POLL_S)


def _wait_for_all(
    store: dist.Store, rank: int, world_size: int, timeout_s: float, end_s: float, named: str
) -> None:
    """Announce this rank, and wait until all others have announced themselves.

    The store is asked again and again: its own `wait` prints a warning of C++ at a timeout.
    """
    keys = [f"rank {number} is here" for number in range(world_size)]
    missing = [number for number in range(world_size) if number != rank]
    remind_s = time.monotonic() + REMINDER_S
    try:
        store.set(keys[rank], "1")
        while missing := [number for number in missing if not store.check([keys[number]])]:
            if time.monotonic() > end_s:
                break
            if time.monotonic() > remind_s:
                remind_s = end_s
                text = f"waiting for {_list(missing)} of {world_size}, for {timeout_s:g} s at most"
                warnings.warn(f"{named}: {text}", stacklevel=2)  # ranks other than 0 are silent
            time.sleep(_POLL_S if end_s - time.monotonic() > _POLL_S else 0.01)
    except RuntimeError:  # rank 0, which serves the store, has given up or is gone
        pass
    if missing:
        message = f"{_list(missing)} of {world_size} did not come within {timeout_s:g} s"
        raise MissingRanksError(f"{named}: {message}; {_hint(named)}")


def _list(ranks: Sequence[int]) -> str:
    """Return the ranks as words, the first of them where there are many."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _hint(named: str) -> str:
    """Return what to type where these variables number ranks that nobody starts."""
    names = " ".join(word.partition("=")[0] for word in named.split())
    return f"try: start all ranks, or: unset {names}"
