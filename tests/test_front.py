"""The command line: codes, one line per problem, once per job, nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gptrain.config.cli import run_command
from gptrain.core.errors import JobFailedError
from tests.command_line import refused

NANO = ("model=gpt_nano", "trainer.accelerator=cpu")


@pytest.fixture
def outputs() -> Path:
    return Path(os.environ["GPTRAIN_OUTPUT_DIR"])


LOOK = """
import os, runpy, sys
def look(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.bind", "os.mkdir"):
        print("did", event, args)
    if event == "open" and isinstance(args[2], int) and args[2] & 3 and ".pyc" not in str(args[0]):
        print("wrote", args[0])
sys.dont_write_bytecode = True
sys.addaudithook(look)
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    print(end.code or 0, sorted({"torch", "lightning", "numpy", "tqdm"} & sys.modules.keys()))
"""
PLAN = ("gptrain.plan", "model=gpt2", "trainer.devices=8", "hardware=h100_sxm", "--json")


@pytest.mark.parametrize(
    ("words", "code", "n_errors"),
    [(("train", "trainer.devices=0", "optimizer.lr=-1"), 2, 2), (PLAN, 0, 0),
     (("gptrain.runs",), 66, 1)],
    ids=["train", "plan", "runs"],
)  # fmt: skip
def test_what_only_looks_starts_and_writes_nothing_and_imports_nothing_heavy(
    words, code, n_errors, command, outputs
):
    """Little more than Hydra and pydantic: a second, where torch takes six."""
    done = command("-c", LOOK, *words)
    assert done.stdout.splitlines()[-1] == f"{code} []" and "wrote" not in done.stdout, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error"] * n_errors
    assert list(outputs.iterdir()) == []


@pytest.mark.parametrize(
    "stop, code", [(JobFailedError(75, "preempted"), 75), (KeyboardInterrupt(), 130)], ids=str
)
def test_a_stop_ends_the_sweep_and_not_one_job(stop, code):
    seen = []

    def job(cfg):
        seen.append(cfg.seed)
        raise stop

    assert run_command(job, ["-m", "seed=1,2", *NANO]) == code
    assert seen == [1]


@pytest.mark.engine("optuna")
def test_a_search_is_composed_before_it_starts():
    words = ("-m", "hparams_search=optuna", *NANO)
    (line,) = refused(*words, "model.dropuot=interval(0,1)")
    assert "model.dropuot" in line
