"""Data workers send batches through /dev/shm. A full /dev/shm is an error, never a hang."""

import errno
import os
import subprocess
import sys

import pytest
from torch.utils.data import Dataset

from gptrain.core.errors import DataError
from gptrain.lit import datamodule

READ_ALL = """
import os
from functools import partial
from gptrain.data import DummyTextDataset
from gptrain.lit.datamodule import Loader, collate_and_share
from gptrain.runtime.signals import ignore_in_worker

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


class Fails(Dataset):
    """Raises an error for its third sample."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise self.error
        return index


def test_an_error_of_a_data_worker_is_one_line():
    """PyTorch puts the traceback of a worker in front of the message."""
    cases = (
        (
            DataError("Caught DataError in a worker.\nTraceback:\nDataError: bad\n"),
            DataError,
            "bad",
        ),
        (RuntimeError("unable to write: No space left on device (28)"), OSError, "no space left"),
        (RuntimeError("something else"), RuntimeError, "something else"),
    )
    for error, kind, message in cases:
        loader = datamodule.Loader(Fails(error), batch_size=1)
        with pytest.raises(kind, match=f"^(.Errno 28. )?{message}") as raised:
            list(loader)
        if kind is OSError:
            assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "/dev/shm")
        else:
            assert str(raised.value) == message


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_shared_memory_that_is_full_ends_the_loop_in_one_error():
    mount = "mount -t tmpfs -o size=700k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], capture_output=True).returncode:
        pytest.skip("may not mount")
    command = ["unshare", "-m", "bash", "-c", f'{mount}; exec "$@"', "bash", sys.executable, "-c"]
    run = subprocess.run([*command, READ_ALL], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("OSError: [Errno 28] no space left"), run.stderr
