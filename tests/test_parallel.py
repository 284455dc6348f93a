"""Every strategy computes what one process computes: the leaf alone, and whole runs."""

import inspect
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
import in_ranks
import parallel_cases
import strategy_cases


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """world size -> folder of results; each group of ranks is started once."""
    # Imported once for all ranks; only what is installed is found there before Python 3.13.
    multiprocessing.set_forkserver_preload(["gptrain.lit.strategies.spread", "gptrain.data"])
    folders = {}

    def run(world_size):
        if world_size not in folders:
            folders[world_size] = tmp_path_factory.mktemp(f"ranks_{world_size}")
            torch.multiprocessing.start_processes(
                in_ranks.run_rank,
                (world_size, str(folders[world_size])),
                nprocs=world_size,
                start_method="forkserver",
            )
        return folders[world_size]

    return run


def check(folder, case, world_size):
    for rank in range(world_size):
        path = folder / f"{case.__name__}.{rank}"
        result = path.read_text() if path.exists() else "not run: a case before it failed"
        assert result == "passed", f"rank {rank}: {result}"


@pytest.mark.parametrize("module", [parallel_cases, strategy_cases])
def test_no_case_is_forgotten(module):
    written = {
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__
        and not name.startswith("_")
        and not inspect.signature(function).parameters
    }
    assert written == {case for cases in module.CASES.values() for case in cases}


@pytest.mark.parametrize("case", in_ranks.CASES[2], ids=lambda case: case.__name__)
def test_on_two_ranks(case, folder_of):
    check(folder_of(2), case, 2)


@pytest.mark.parametrize("case", in_ranks.CASES[4], ids=lambda case: case.__name__)
def test_on_four_ranks(case, folder_of):
    check(folder_of(4), case, 4)
