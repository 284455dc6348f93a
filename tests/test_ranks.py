"""Two processes over gloo: one run, whichever launcher started them.

Spawned ones, as a person's are, start in test_project.py and test_signals_run.py.
"""

from __future__ import annotations

import pytest

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
