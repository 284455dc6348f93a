"""The store of a job, through which its ranks find each other."""

import os
from functools import cache

from torch.distributed import HashStore, PrefixStore, Store, rendezvous

from gptrain.runtime.process import this_process


@cache
def job_store() -> Store:
    """Return the store through which the ranks find each other. Every rank must call it.

    torchrun serves it, or else rank 0, at MASTER_ADDR and MASTER_PORT. Raises a ValueError if one
    of these is missing, and a torch.distributed.DistError if the store cannot be reached.
    """
    store, _, _ = next(rendezvous("env://"))
    return store


def start_store() -> Store:
    """Return a store for this start of the ranks to make their process group with. Collective.

    It is a HashStore for one rank, else a part of the store at MASTER_ADDR and MASTER_PORT. Raises
    a ValueError if one of these is missing, and a torch.distributed.DistError if it cannot connect.

    torchrun keeps its store when it restarts the ranks of one node. On several nodes each agent
    counts its own restarts only; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start a new
    store (pytorch#135712).
    """
    process = this_process()
    if process.world_size == 1:
        return HashStore()
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"start {count if process.n_nodes == 1 else ''}", job_store())
