"""A decorator that runs a test function in every rank of a new process group.

@on_ranks(2)
def test_fsdp_equals_one_process():
    ...
"""

import datetime
import importlib
import os
import warnings

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from tests.forked import server

COLLECTIVE_S = 60  # a rank that failed leaves the others waiting


def on_ranks(world_size):
    """Turn a function into a test that runs it on `world_size` ranks and raises their errors."""

    def decorate(case):
        def test(tmp_path):
            server()
            words = (world_size, case.__module__, case.__name__, tmp_path / "store")
            start_processes(run_case, words, world_size, start_method="forkserver")

        test.__name__, test.__doc__, test.case = case.__name__, case.__doc__, case
        return test

    return decorate


def run_case(rank, world_size, module, name, store):
    """Join the process group, call the test function, and leave the group."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="lightning")
    test = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    members = {"store": dist.FileStore(str(store), world_size), "rank": rank}
    timeout = datetime.timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group("gloo", world_size=world_size, timeout=timeout, **members)
    test.case()
    dist.barrier()
    dist.destroy_process_group()
