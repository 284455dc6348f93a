"""Two processes over gloo: one run, whichever launcher started them.

Spawned ones, as a person's are, start in test_project.py and test_signals_run.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from gptrain.ranks.supervisor import job_code
from gptrain.resilience.status import write_status
from tests.conftest import ROOT, TINY

LOGGED = ("logger=csv", "trainer.log_every_n_steps=1", "data.global_batch_size=8")


def one_log_and_no_traces_of_other_ranks(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"train.log", "result.json", "status.json", ".hydra", "checkpoints"} <= names
    assert not [name for name in names if "rank" in name or "process" in name]


def test_two_ranks_write_one_log_whatever_their_folder_is_called(train):
    """That they train what one does: tests/strategies."""
    log = "hydra.job_logging.formatters.file.format='[${name}] %(message)s'"  # a key of the run
    two = train(*LOGGED, log, "trainer.devices=2", name="two words = ä")
    assert two.code == 0, two.err
    one_log_and_no_traces_of_other_ranks(two.folder)
    labels = [line.split()[0] for line in two.out.splitlines()]
    assert labels == ["model", "strategy", "batch", "plan", "run", "result", "next"]
    lines = (two.folder / "train.log").read_text().splitlines()
    assert len(lines) == len(labels) and all(line.startswith("[train] ") for line in lines)


def test_a_job_ends_with_the_code_of_the_rank_that_failed_first(tmp_path):
    """Which has written the status: rank 0 lost it, and ended with 70."""
    write_status(tmp_path, cause="data", exit_code=65, rank=1)
    ranks = [SimpleNamespace(exitcode=code) for code in (70, 65, -9)]
    assert job_code(OmegaConf.create({"run_dir": str(tmp_path)}), ranks) == 65


@pytest.mark.slow
def test_torchrun_makes_one_folder_and_one_set_of_lines_from_any_folder(command, tmp_path):
    (tmp_path / "anywhere").mkdir()
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    # Where there is no checkpoint yet `last` is none, as rank 0 tells the others.
    options = [f"output_dir={tmp_path}", *TINY, "trainer.devices=2", *LOGGED, "ckpt_path=last"]
    run = command(*torchrun, str(ROOT / "train.py"), *options, cwd=tmp_path / "anywhere")
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()].count("model") == 1
    (folder,) = (tmp_path / "train").iterdir()
    one_log_and_no_traces_of_other_ranks(folder)
    assert not list((tmp_path / "anywhere").iterdir())
