"""Batches of data workers pass through /dev/shm: too little of it is said, and never waited for."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from gptrain.lit.datamodule import check_shared_memory
from gptrain.problems import ConfigError

READ_ALL = """
import os
from functools import partial
from gptrain.data import DummyTextDataset
from gptrain.lit.datamodule import Loader, collate_and_share
from gptrain.resilience.signals import ignore_in_worker

loader = Loader(
    DummyTextDataset(4096, 1024, 256),
    batch_size=64,
    num_workers=2,
    collate_fn=collate_and_share,
    multiprocessing_context="fork",
    worker_init_fn=partial(ignore_in_worker, os.getpid()),
)
for batch in loader:
    pass
"""


def test_batches_that_do_not_fit_are_told_with_both_numbers(monkeypatch):
    sample = (torch.zeros(127, dtype=torch.int64), {"targets": [torch.zeros(127)]})
    batch_bytes = 512 * 127 * (8 + 4)
    found = SimpleNamespace(free=8 * batch_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: found)
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    check_shared_memory(sample, 512, num_workers=2, n_local=1)  # 2 of each worker, twice
    check_shared_memory(sample, 2**40, num_workers=0, n_local=1)
    with pytest.raises(ConfigError, match=r"num_workers=2: 16 batches of 0\.7 MiB .* 6\.0 MiB"):
        check_shared_memory(sample, 512, num_workers=2, n_local=2)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_shared_memory_that_is_full_ends_the_loop_in_one_error():
    mount = "mount -t tmpfs -o size=700k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], capture_output=True).returncode:
        pytest.skip("may not mount")
    command = ["unshare", "-m", "bash", "-c", f'{mount}; exec "$@"', "bash", sys.executable, "-c"]
    run = subprocess.run([*command, READ_ALL], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("OSError: [Errno 28] full: no room"), run.stderr
