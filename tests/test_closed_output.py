"""A run whose output pipe is closed continues, and SIGPIPE ends a command that only prints.

tests/test_signals_run.py has the same test with several ranks.
"""

import errno
import io
import logging
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from gptrain.config import cli
from gptrain.core.locations import LIBRARY
from gptrain.plan.__main__ import main
from gptrain.runtime.streams import Lines, RunStream, flush_output, prepare_streams

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


def test_a_closed_stderr_keeps_its_number_so_that_no_file_gets_it(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", None)
    kept = os.dup(2)
    try:
        os.close(2)
        prepare_streams(is_run=True)
        assert sys.stderr.fileno() == 2
        assert os.path.samestat(os.fstat(2), os.stat(os.devnull))
    finally:
        os.dup2(kept, 2)
        os.close(kept)


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


def test_an_error_keeps_its_code_if_the_output_fails_too(typed, monkeypatch):
    monkeypatch.setattr(cli, "flush_output", lambda: 74)
    assert typed(main, "model=nothing")[0] == 2


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


class FullDisk(io.StringIO):
    """A stream whose every write fails with the given error. Its file stays open."""

    def __init__(self, error: OSError, file: int):
        super().__init__()
        self.error, self.file, self.name, self.n_calls = error, file, "stdout", 0

    def fileno(self) -> int:
        return self.file

    def write(self, text: str) -> int:
        self.n_calls += 1
        raise self.error

    flush = write


@pytest.mark.parametrize("number, is_named", [(errno.ENOSPC, True), (errno.EPIPE, False)])
def test_output_that_cannot_be_written_is_discarded_with_one_warning(
    number, is_named, tmp_path, caplog, monkeypatch, capsys
):
    with (tmp_path / "file").open("w") as file:
        full = FullDisk(OSError(number, os.strerror(number)), file.fileno())
        stream = RunStream(full)
        assert stream.write("four") == 4 and stream.encoding == full.encoding
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(os.devnull))
        line = f"warning: stdout: {os.strerror(number)}, discarded"
        assert caplog.messages == [line] * is_named
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(full, "flush", lambda: full.write(""))
        with (tmp_path / "other").open("w") as other:
            os.dup2(other.fileno(), file.fileno())
        assert flush_output() == (74 if is_named else 70)
        assert os.path.samestat(os.fstat(file.fileno()), os.stat(os.devnull))
        assert capsys.readouterr().err.startswith("error: ")


def test_a_warning_of_gptrain_is_one_line_and_other_warnings_keep_pythons_form(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    prepare_streams(is_run=True)
    first = sys.stdout
    prepare_streams(is_run=True)
    assert isinstance(first, RunStream) and sys.stdout is first
    assert first.errors == sys.stderr.errors == "replace"
    ours, others = str(LIBRARY / "x.py"), "/somewhere/x.py"
    assert warnings.formatwarning("a\nb", UserWarning, ours, 7) == "warning: a\\nb\n"
    assert Lines().format(logging.makeLogRecord({"msg": "a\x1b\nb"})) == "a\\x1b\nb"
    for category, path in ((UserWarning, others), (DeprecationWarning, ours)):
        text = warnings.formatwarning("a", category, path, 7)
        assert text.startswith(f"{path}:7: {category.__name__}: a\n")
