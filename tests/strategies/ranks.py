"""Groups of ranks that run cases: functions that every rank of a group calls at once.

    @on_ranks(2)
    def test_fsdp_equals_one_process():
        ...

The ranks of a file are started at its first case and stay for the others; each can run alone (-k).
After a failure they are out of step with each other, and the next case starts new ones.
A file may have `prepare(folder)`: rank 0 calls it first, alone, then all others, all of them before
there is a process group.
"""

import datetime
import importlib
import multiprocessing
import os
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from forked import PRELOAD

COLLECTIVE_S = 60  # a rank that failed leaves the others waiting
CASE_S = 300


def on_ranks(world_size):
    """Makes a test of a case."""

    def decorate(case):
        def test(ranks):
            ranks(world_size, case.__name__)

        test.__name__, test.__doc__, test.case = case.__name__, case.__doc__, case
        return test

    return decorate


class Ranks:
    """A group of processes that run the cases of one module."""

    def __init__(self, world_size, module, folder):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)  # there is one server for all tests of a process
        self.folder, self.pipes, self.processes = folder, [], []
        store = folder / f"store-{world_size}-{os.urandom(4).hex()}"
        for rank in range(world_size):
            pipe, theirs = context.Pipe()
            options = (rank, world_size, module, folder, store, theirs)
            process = context.Process(target=_serve, args=options, daemon=True)
            process.start()
            self.pipes.append(pipe)
            self.processes.append(process)
            if rank == 0:
                self._answer(0)  # it has prepared the file

    def run(self, name):
        """Raises what any rank raised."""
        for pipe in self.pipes:
            pipe.send(name)
        answers = [self._answer(rank) for rank in range(len(self.pipes))]
        failures = [f"rank {rank}: {said}" for rank, said in enumerate(answers) if said != "passed"]
        if failures:
            self.stop()
            pytest.fail("\n".join(failures), pytrace=False)

    def stop(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []

    def _answer(self, rank):
        try:
            return self.pipes[rank].recv() if self.pipes[rank].poll(CASE_S) else "no answer"
        except EOFError:
            return "its process died"


def _serve(rank, world_size, module, folder, store, pipe):
    """One rank's life."""
    cases = importlib.import_module(module)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    if hasattr(cases, "prepare"):
        cases.prepare(folder)
    if rank == 0:
        pipe.send("prepared")
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
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_S),
    )
    while True:
        name = pipe.recv()
        try:
            getattr(cases, name).case()
            pipe.send("passed")
        except BaseException:
            pipe.send(traceback.format_exc())
