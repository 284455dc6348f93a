"""Rendezvous of the ranks of a job: all ranks open one store, or one line names the missing ranks.

torch reports a missing rank as "Wait timeout", as a number of clients, or with a C++ stack trace,
depending on the rank that waits. In this file every rank first sets a key of the store, so that an
error message can name the ranks whose keys are missing.
"""

import errno
import os
import socket
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

# Time after which a rank prints that it is waiting. Ranks of a job usually start within seconds.
REMINDER_S = 30.0
_POLL_S = 0.5  # time between two looks at the store or at the network
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


class MissingRanksError(Exception):
    """Raised if some ranks of the job did not connect, or if the address cannot be used.

    The message names these ranks and the values of the environment variables that the ranks use.

    Attributes:
        cause: Key of `gptrain.core.errors.CAUSES`: the run ends as one in which a rank hung.
    """

    cause = "hang"


def open_store(
    rank: int,
    world_size: int,
    timeout_s: float,
    store_path: str | None = None,
    variables: Sequence[str] = (),
) -> dist.Store:
    """Open the store of the job, and return it when all ranks have opened it.

    All ranks must call this function. A rank that has waited for REMINDER_S seconds warns once,
    with the numbers of the missing ranks.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks of the job.
        timeout_s: Time for which a rank waits for the other ranks.
        store_path: File through which the ranks of one node connect. None for MASTER_ADDR and
            MASTER_PORT.
        variables: Names of the environment variables that number the ranks, for error messages.

    Raises:
        MissingRanksError: If a rank does not connect in time, or if the address cannot be used. An
            error of torch about the store that torchrun serves is passed on.
    """
    end_s = time.monotonic() + timeout_s
    names = (*variables, *(() if store_path else _ADDRESS))
    settings = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    if store_path:
        store: dist.Store = dist.FileStore(store_path, world_size)
        store.set_timeout(timedelta(seconds=timeout_s))
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves the store
        timeout = timedelta(seconds=timeout_s)
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    else:
        store = _open_network_store(rank, world_size, timeout_s, end_s, settings)
    _wait_for_all(store, rank, world_size, timeout_s, end_s, settings)
    return store


def _open_network_store(
    rank: int, world_size: int, timeout_s: float, end_s: float, settings: str
) -> dist.Store:
    """Open the store at MASTER_ADDR:MASTER_PORT, which rank 0 serves.

    Args:
        rank: Global rank of this process.
        world_size: Number of ranks of the job.
        timeout_s: Time that the messages name as the limit.
        end_s: Time of `time.monotonic` at which the wait ends.
        settings: Words NAME=value of the environment variables, with which error messages begin.

    Raises:
        MissingRanksError: If the address cannot be used, or if rank 0 does not serve it in time.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port_text = os.environ.get("MASTER_PORT", "")
    if not host or not port_text.strip().isdigit():
        message = (
            "MASTER_ADDR and MASTER_PORT must be the host of rank 0 and a free port of that host"
        )
        raise MissingRanksError(f"{settings}: {message}")
    port = int(port_text)
    if not 1 <= port <= 65535:
        message = f"MASTER_PORT={port} is not a port number; allowed: 1 to 65535"
        raise MissingRanksError(f"{settings}: {message}")
    _wait_for_name(host, timeout_s, end_s, settings)
    if rank == 0:
        _check_port_is_free(port, settings)
    else:
        _wait_for_server(host, port, timeout_s, end_s, settings)
    timeout = timedelta(seconds=max(1.0, end_s - time.monotonic()))
    try:
        return dist.TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        message = f"rank {rank} cannot use this address ({reason})"
        raise MissingRanksError(f"{settings}: {message}") from None


def _wait_for_name(host: str, timeout_s: float, end_s: float, settings: str) -> None:
    """Wait until a host name can be resolved.

    A cluster may publish the name of a new host some seconds after the ranks have started.

    Args:
        host: Value of MASTER_ADDR.
        timeout_s: Time that the message names as the limit.
        end_s: Time of `time.monotonic` at which the wait ends.
        settings: Environment variables with which the error message begins.

    Raises:
        MissingRanksError: If the name cannot be resolved before `end_s`.
    """
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: the name is not a domain name
            if time.monotonic() > end_s:
                message = f"MASTER_ADDR={host} was not found within {timeout_s:g} s ({error})"
                hint = "the name or address of the host of rank 0"
                raise MissingRanksError(f"{settings}: {message}; try: {hint}") from None
        time.sleep(_POLL_S)


def _check_port_is_free(port: int, settings: str) -> None:
    """Check that rank 0 can listen on a port of this host.

    Args:
        port: Value of MASTER_PORT.
        settings: Words NAME=value of the environment variables, with which error messages begin.

    Raises:
        MissingRanksError: If the port cannot be used, for example because another process uses it.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            reason = "taken by another process" if is_taken else error.strerror
            message = f"MASTER_PORT={port} of this host cannot be used by rank 0: {reason}"
            hint = "another MASTER_PORT, the same in all ranks"
            raise MissingRanksError(f"{settings}: {message}; try: {hint}") from None


def _wait_for_server(host: str, port: int, timeout_s: float, end_s: float, settings: str) -> None:
    """Wait until rank 0 listens at its address.

    torch's TCPStore would also wait, but it prints each failed attempt.

    Args:
        host: Value of MASTER_ADDR.
        port: Value of MASTER_PORT.
        timeout_s: Time that the message names as the limit.
        end_s: Time of `time.monotonic` at which the wait ends.
        settings: Environment variables with which the error message begins.

    Raises:
        MissingRanksError: If rank 0 does not listen before `end_s`.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > end_s:
                reason = error.strerror or str(error)
                message = f"rank 0 did not answer within {timeout_s:g} s ({reason})"
                raise MissingRanksError(f"{settings}: {message}; {_hint(settings)}") from None
        time.sleep(_POLL_S)


def _wait_for_all(
    store: dist.Store, rank: int, world_size: int, timeout_s: float, end_s: float, settings: str
) -> None:
    """Set the key of this rank in the store, and wait until the keys of all ranks are set.

    The keys are polled, because `store.wait` prints a C++ warning at a timeout. After REMINDER_S
    seconds a warning names the missing ranks once.

    Args:
        store: Store that all ranks open.
        rank: Global rank of this process.
        world_size: Number of ranks of the job.
        timeout_s: Time that the messages name as the limit.
        end_s: Time of `time.monotonic` at which the wait ends.
        settings: Environment variables with which the messages begin.

    Raises:
        MissingRanksError: If the keys of some ranks are not set before `end_s`, or if rank 0 has
            exited, which serves the store.
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
                ranks = _describe_ranks(missing)
                message = f"waiting up to {timeout_s:g} s for {ranks} of {world_size}"
                # A warning, not a log line: ranks other than 0 do not log.
                warnings.warn(f"{settings}: {message}", stacklevel=2)
            time.sleep(_POLL_S if end_s - time.monotonic() > _POLL_S else 0.01)
    except RuntimeError:  # rank 0, which serves the store, has given up or has exited
        pass
    if missing:
        ranks = _describe_ranks(missing)
        message = f"{ranks} of {world_size} did not connect within {timeout_s:g} s"
        raise MissingRanksError(f"{settings}: {message}; {_hint(settings)}")


def _describe_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2" for a message, with an ellipsis after eight ranks."""
    numbers = ", ".join(map(str, ranks[:8]))
    if len(ranks) == 1:
        return f"rank {numbers}"
    return f"ranks {numbers}, …" if len(ranks) > 8 else f"ranks {numbers}"


def _hint(settings: str) -> str:
    """Return the advice at the end of an error message about missing ranks.

    The advice is to start all ranks, or to unset the variables of `settings` (words NAME=value):
    they may have been left over in a shell in which no other rank starts.
    """
    names = " ".join(word.partition("=")[0] for word in settings.split())
    return f"try: start all ranks, or: unset {names}"
