"""A run whose output pipe is closed continues, and SIGPIPE ends a command that only prints.

tests/test_signals_run.py has the same test with several ranks.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = (
    "train.py model=gpt_nano trainer=cpu trainer.max_steps=1 data.seq_len=16 data.batch_size=2"
    " trainer.limit_val_batches=1 logger=none"
)
PLAN = "-m gptrain.plan model=gpt_nano"
FULL = "No space left on device"


def shell(command: str, **variables: str) -> tuple[int, str]:
    """Code of the first process of a pipe, and what it says on stderr."""
    done = subprocess.run(
        ["bash", "-c", f'"$0" {command}; exit ${{PIPESTATUS[0]}}', sys.executable],
        cwd=ROOT, env=os.environ | variables, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("place", [None, "/dev/full"])
def test_a_run_continues_without_its_output_and_writes_its_log_file(place, train, monkeypatch):
    stdout = place and open(place, "w")  # noqa: SIM115  None: closed
    monkeypatch.setattr(sys, "stdout", stdout)
    run = train("trainer.max_steps=1", "logger=none")
    assert (run.code, run.err) == (0, "")
    assert (run.folder / "result.json").exists()
    logged = (run.folder / "train.log").read_text()
    assert "result" in logged
    assert logged.count(f"warning: /dev/full: {FULL}, discarded") == (place is not None)


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (">&-", 0, ""),
        ("<&- >&-", 0, ""),
        ("| true", 128 + signal.SIGPIPE, ""),
        (">/dev/full", 74, f"error: OSError: [Errno 28] {FULL}\n"),
    ],
)
def test_a_command_that_prints_ends_as_a_filter(words, code, output):
    assert shell(f"{PLAN} {words}") == (code, output)


def test_a_character_that_the_terminal_does_not_have_is_replaced(tmp_path):
    code, output = shell(f"{RUN} run_dir={tmp_path}/ran", PYTHONIOENCODING="ascii")
    assert (code, output) == (0, "")
    assert "·" in (tmp_path / "ran" / "train.log").read_text(encoding="utf-8")


def test_a_script_with_windows_line_endings_is_named_by_every_command():
    for words in ("train.py trainer.max_steps=3$'\\r'", "-m gptrain.runs outputs$'\\r'"):
        code, output = shell(words)
        assert code == 2 and output.count("\n") == 1
        assert (
            r"\r: ends with a carriage return: the script has Windows line endings; try:" in output
        )


def test_ctrl_c_in_the_imports_is_one_line(tmp_path):
    (tmp_path / "hydra.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert shell(RUN, PYTHONPATH=path) == (130, "interrupted\n")
