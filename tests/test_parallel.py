"""Every strategy computes what one process computes; the cases are in parallel_cases.py."""

import sys
from pathlib import Path

import pytest
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
import parallel_cases as cases


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """world size -> folder of results, each group of ranks started once."""
    folders = {}

    def run(world_size):
        if world_size not in folders:
            folders[world_size] = tmp_path_factory.mktemp(f"ranks_{world_size}")
            ranks = mp.start_processes(
                cases.run_rank,
                (world_size, str(folders[world_size])),
                nprocs=world_size,
                join=False,
                start_method="spawn",
            )
            ranks.join(timeout=300)
        return folders[world_size]

    return run


def check(folder, case, world_size):
    for rank in range(world_size):
        path = folder / f"{case.__name__}.{rank}"
        result = path.read_text() if path.exists() else "not run: a case before it failed"
        assert result == "passed", f"rank {rank}: {result}"


@pytest.mark.parametrize("case", cases.TWO_RANKS, ids=lambda case: case.__name__)
def test_on_two_ranks(case, folder_of):
    check(folder_of(2), case, 2)


@pytest.mark.parametrize("case", cases.FOUR_RANKS, ids=lambda case: case.__name__)
def test_on_four_ranks(case, folder_of):
    check(folder_of(4), case, 4)
