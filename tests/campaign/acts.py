"""What a fault does, once it is due, in the rank that it is for."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

from gptrain.launch.process import this_process
from gptrain.resilience import fileops

run_dir = Path()  # of the run, once the fault is armed


class Planted(Exception):
    """The exception of a fault."""


def kill(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_launcher(*_) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def kill_group(*_) -> None:
    os.killpg(0, signal.SIGKILL)


def term(*_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(*_) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def warn_by_usr1(*_) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def term_group(*_) -> None:
    if os.fork() == 0:  # from outside: a worker obeys its rank
        os.killpg(0, signal.SIGTERM)
        os._exit(0)


def term_launcher(*_) -> None:
    os.kill(os.getppid(), signal.SIGTERM)


def stop(*_) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_for_a_while(*_) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(4.0)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def fail(*_) -> None:
    raise Planted(f"on rank {this_process().rank}")


def hold_interpreter(*_) -> None:
    import re

    re.match("(a?){40}a{40}", "a" * 40)  # hours in C, and the interpreter's lock with it


def no_space(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def io_error(*_) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def read_only(*_) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def poison(loss):
    """A loss that is not a number; as a hook of backward, a gradient."""
    return loss * float("nan")


def kill_worker(*_) -> None:
    from multiprocessing import active_children

    os.kill(active_children()[0].pid, signal.SIGKILL)


def limit_files(*_) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def fill_disk(*_) -> None:
    fileops.free_bytes = lambda folder: 1000


def dawdle(*_) -> None:
    time.sleep(3.0)


def lag(*_) -> None:
    time.sleep(0.3)


def call_alone(*_) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(3))


def fill_log(*_) -> None:
    """The disk is full for TensorBoard's file, which is opened anew for each write."""
    for path in run_dir.glob("events.out.tfevents.*"):
        path.unlink()
        path.symlink_to("/dev/full")
