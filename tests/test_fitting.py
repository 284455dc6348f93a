"""gptrain.fit: the run of the command line from Python, which leaves nothing behind there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

import gptrain
from tests.conftest import TINY
from tests.processes import wait_until

WORDS = (*TINY, "logger=none", "callbacks=none", "data.global_batch_size=8")


@pytest.mark.slow
def test_runs_inside_a_users_hydra_app_equal_those_of_the_command_line(train, tmp_path, capfd):
    """A failed run raises an exception with the exit code and the folder of the run."""
    by_hand = train("logger=none", "callbacks=none", "data.global_batch_size=8")
    diverging = ("optimizer.lr=1e30", "scheduler=constant", f"run_dir={tmp_path / 'second'}")
    (tmp_path / "app.yaml").write_text("mine: 1")
    with initialize_config_dir(str(tmp_path), version_base=None):
        hydra, before = GlobalHydra.instance().hydra, dict(os.environ)
        run = gptrain.fit((*WORDS, "trainer.devices=2", f"run_dir='{tmp_path / 'a b'}'"))
        with pytest.raises(gptrain.RunFailed, match="error: ") as failed:
            gptrain.fit([*WORDS, *diverging])
        assert GlobalHydra.instance().hydra is hydra and compose("app").mine == 1
        assert dict(os.environ) == before
    assert run.folder == tmp_path / "a b"
    assert (failed.value.code, failed.value.folder) == (79, tmp_path / "second")
    assert run.metrics["train/loss"] == pytest.approx(by_hand.metrics["train/loss"], rel=1e-5)
    assert "strategy  ddp · 2 x cpu" in capfd.readouterr().out
    assert run.net is run.net and not run.net.training and run.tokenizer is None


def test_a_run_that_is_refused_is_one_exception_with_a_line_for_each_fault(tmp_path, capfd):
    with pytest.raises(gptrain.ConfigError) as refused:
        gptrain.fit(["data.batch_size=0", "optimizer.lr=fast", f"output_dir={tmp_path}"])
    assert refused.value.code == 2
    keys = {line.split(": ")[1] for line in refused.value.lines}
    assert keys == {"data.batch_size=0", "optimizer.lr=fast"}
    assert not list(tmp_path.iterdir())
    with pytest.raises(gptrain.ConfigError, match="error: seed: not key=value"):
        gptrain.fit(["seed"])


RUN = """
import os, signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit("saved"))
sys.stdin.read()  # a run does not read what is typed into a notebook or a shell
os.mkdir("begun" if os.getsid(0) == os.getpid() else "the terminal's Ctrl-C would come twice")
signal.pause()
"""
SCRIPT = """
import sys
import gptrain
try:
    run = gptrain.fit(sys.argv[2:], conf=sys.argv[1])
    print(run.folder, file=sys.stderr)
except KeyboardInterrupt:
    print("stopped here", file=sys.stderr)
"""


def test_ctrl_c_is_passed_on_and_raised_once_the_run_has_ended(tmp_path):
    """A script without `if __name__`, in a folder of no project."""
    (tmp_path / "train.py").write_text(RUN)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", str(tmp_path / "conf"), *WORDS]
    pipe = subprocess.PIPE
    script = subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stderr=pipe, text=True)
    wait_until((tmp_path / "begun").exists, 60)
    script.send_signal(signal.SIGINT)
    assert script.communicate(timeout=60)[1].splitlines() == ["saved", "stopped here"]
