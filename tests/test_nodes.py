"""torchrun on two nodes, as the README gives it: see tests/nodes.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import ExitStack

import pytest
import torch

import gptrain
from gptrain.core.errors import FOLDER_UNUSABLE
from tests.conftest import TINY
from tests.nodes import two_nodes
from tests.processes import wait_until
from tests.run import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # two other test files run on the same two cores
WORDS = (
    *TINY, "trainer.devices=1", "trainer.num_nodes=auto", "trainer.max_steps=40",
    "trainer.val_check_interval=10", "trainer.log_every_n_steps=1", "strategy.timeout_s=30",
    "data.global_batch_size=8", "logger=none", "ckpt_path=last",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes():
    """Two nodes, a and b, joined by a cable."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("needs root, ip and unshare")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_nodes())
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        yield made


def test_a_lost_node_that_comes_back_goes_on_bit_for_bit(nodes, train, tmp_path):
    """The run equals a run of two ranks on one machine. The other agent waits for the lost node."""
    folder, log = tmp_path / "run", tmp_path / "log"
    words = (*WORDS, "model.dropout=0.1")
    agents = [node.start(log, *words, f"run_dir={folder}") for node in nodes]
    wait_until((folder / "checkpoints" / "step-00000010").exists, timeout_s=300)
    nodes[1].kill()
    agents[1].wait()
    agents[1] = nodes[1].start(log, *words, f"run_dir={folder}")
    for agent in agents:
        assert agent.wait(400) == 0, log.read_text()
    assert "from step" in log.read_text()
    one_machine = train(*words, "trainer.devices=2", "trainer.num_nodes=1", name="one", tiny=False)
    assert one_machine.code == 0, one_machine.err
    two_nodes = Run(folder, 0, "", "")
    assert two_nodes.column("train/loss") == one_machine.column("train/loss")
    weights, expected = (
        gptrain.load(run.folder, "last").state_dict() for run in (two_nodes, one_machine)
    )
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert len([*folder.glob("*log*")]) == 1  # only rank 0 writes a log
    assert json.loads((folder / "status.json").read_text())["host"] in ("a", "b")


def test_a_folder_that_is_not_shared_is_one_line(nodes, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    folder.mkdir()
    hidden = f"mount -t tmpfs none {folder}"
    agents = [
        node.start(log, *WORDS, f"run_dir={folder}", restarts=0, before=before)
        for node, before in zip(nodes, ("", hidden), strict=True)
    ]
    for agent in agents:
        assert agent.wait(400) != 0
    output = log.read_text()
    (line,) = {line for line in output.splitlines() if line.startswith(f"error: run_dir={folder}")}
    assert "does not see the files of rank 0 in this folder" in line and "try: run_dir=" in line
    status = json.loads((folder / "status.json").read_text())
    assert status["exit_code"] == FOLDER_UNUSABLE
