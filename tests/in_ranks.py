"""Ranks that run the cases of parallel_cases and strategy_cases, started once for all of them."""

import datetime
import os
import traceback
import warnings
from pathlib import Path

import parallel_cases
import strategy_cases
import torch
import torch.distributed as dist

CASES = {n: parallel_cases.CASES[n] + strategy_cases.CASES[n] for n in (2, 4)}


def run_rank(rank, world_size, folder):
    """One rank's life: every case of this world size, each result into a file of its own."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    strategy_cases.find_truths(Path(folder, f"single_{rank}"))
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),  # a rank that failed leaves the others waiting
    )
    for case in CASES[world_size]:
        try:
            case()
            result = "passed"
        except Exception:
            result = traceback.format_exc()
        Path(folder, f"{case.__name__}.{rank}").write_text(result)
        if result != "passed":
            return  # the group is out of step
    dist.destroy_process_group()
