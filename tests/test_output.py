"""What a run and a command print: characters, warnings and errors; SIGPIPE ends a command."""

import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from gptrain.core.locations import LIBRARY
from gptrain.runtime.streams import Lines, prepare_streams

ROOT = Path(__file__).parents[1]
RUN = (
    "train.py model=gpt_nano trainer=cpu trainer.max_steps=1 data.seq_len=16 data.batch_size=2"
    " trainer.limit_val_batches=1 logger=none"
)
PLAN = "-m gptrain.plan model=gpt_nano"


def shell(command: str, **variables: str) -> tuple[int, str]:
    """Code of the first process of a pipe, and what it says on stderr."""
    done = subprocess.run(
        ["bash", "-c", f'"$0" {command}; exit ${{PIPESTATUS[0]}}', sys.executable],
        cwd=ROOT, env=os.environ | variables, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (">&-", 0, ""),
        ("| true", 128 + signal.SIGPIPE, ""),
    ],
)
def test_a_command_that_prints_ends_as_a_filter(words, code, output):
    assert shell(f"{PLAN} {words}") == (code, output)


@pytest.mark.slow  # a fast test prepares such a stream in its own process
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


def test_a_warning_of_gptrain_is_one_line_and_other_warnings_keep_pythons_form(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    prepare_streams(is_run=True)
    assert sys.stdout.errors == sys.stderr.errors == "replace"
    ours, others = str(LIBRARY / "x.py"), "/somewhere/x.py"
    assert warnings.formatwarning("a\nb", UserWarning, ours, 7) == "warning: a\\nb\n"
    assert Lines().format(logging.makeLogRecord({"msg": "a\x1b\nb"})) == "a\\x1b\nb"
    for category, path in ((UserWarning, others), (DeprecationWarning, ours)):
        text = warnings.formatwarning("a", category, path, 7)
        assert text.startswith(f"{path}:7: {category.__name__}: a\n")
