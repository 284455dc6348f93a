"""Errors of a run, the lines that are printed for them, and exit codes.

`ConfigError` holds the problems of a config. `ending_of` turns any other exception into an exit
code, a cause and a printed line.
"""

from __future__ import annotations

import errno
import json
import re
import traceback
from dataclasses import dataclass

DONE = 0
BAD_CONFIG = 2
BAD_DATA = 65
INPUT_NOT_FOUND = 66
FAILED = 70
FOLDER_UNUSABLE = 73
IO_ERROR = 74
PREEMPTED = 75
HUNG = 76
NON_FINITE = 79
INTERRUPTED = 130

# Codes after which the ranks are started again, at most `launcher.max_restarts` times. A code above
# 128 means that signal number (code - 128) ended the process: SIGKILL, often sent when memory is
# full, or SIGSEGV.
RESTARTED = {FAILED, HUNG, 128 + 9, 128 + 11}
# Codes of a run that was asked to stop and resumes later. During the imports a run has no signal
# handlers yet, so SIGUSR1 and SIGTERM end it.
REQUEUED = {PREEMPTED, 128 + 10, 128 + 15}
ENDS_SWEEP = {PREEMPTED, INTERRUPTED}  # codes after which a sweep starts no further job

_UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
_DISK = (*_UNUSABLE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
_LONGEST_VALUE = 200  # characters of a value in an error message
# Parts of error messages of gloo, NCCL and torch, and what is printed before them, by cause.
_PHRASES = {
    "hang": ("Timed out waiting|timed out after|Watchdog caught coll", "a collective timed out"),
    "peer": ("closed by peer|reset by peer|Broken pipe|process exited", "another rank has exited"),
    "memory": (
        "can't allocate memory|out of memory",
        "out of memory (less: a smaller data.batch_size, model.activation_checkpointing=full)",
    ),
}


@dataclass
class ConfigIssue:
    """One problem of the input, whose `str` is the line `<key>=<value>: <message>; try: <hint>`.

    An empty key, a value of None and an empty hint are left out of the line. Characters that are
    not printable, such as line breaks, are escaped.

    Attributes:
        key: Dotted key of the config, flag or environment variable. Empty if there is none.
        value: Value of the key, of any type, shown by `show`. For a null, pass the string "null".
        message: Phrase that names the fault.
        hint: Text to type instead.
    """

    key: str
    value: object
    message: str
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.key}={show(self.value)}" if self.value is not None else self.key
        line = f"{head}: {self.message}" if head else self.message
        line += f"; try: {self.hint}" if self.hint else ""
        return printable(line)


def show(value: object) -> str:
    """Return the text of a value for an error message: `null`, `true`, `[1,a]`, `{a:1}` or `str`.

    Strings have no quotes. A text longer than 200 characters is cut after them and ends with "...".
    """
    text = str(value)
    if value is None or isinstance(value, bool | list | dict):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        text = text.replace('"', "")
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def printable(text: object) -> str:
    """Return `str(text)` with an escape sequence for each character that is not printable.

    Line breaks are such characters, so that the result is one line.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def code_of(error: OSError) -> int:
    """Return the exit code for an error of the operating system.

    It is 73 for missing permissions, a read-only file system, or a path that is no folder or
    exists already, 70 without an error number, and otherwise 74.
    """
    if error.errno is None:
        return FAILED
    return FOLDER_UNUSABLE if error.errno in _UNUSABLE else IO_ERROR


def first_line(error: object) -> str:
    """Return the first line of an exception's message, or the name of its type without a message.

    Blank lines do not count. If the line ends with a colon, the next line is added. `tensor(…)`
    stands for the values of a tensor. For an error that torch raises again for a DataLoader worker,
    the result is the last line of the worker's message.
    """
    text = re.sub(r"\btensor\([^()]*(?:\([^()]*\)[^()]*)*\)", "tensor(…)", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and re.match(r"Caught \w+ in DataLoader worker process", lines[0]):
        lines = [lines[-1].rpartition(f"{type(error).__name__}: ")[2]]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


class RunError(Exception):
    """Error whose message explains it, so that no traceback is printed.

    An exception of another base class is reported in the same way if its class has `cause` and it
    has a `code`.

    Attributes:
        code: Exit code of the command or the run. 70 unless a subclass or an instance sets it.
        cause: Kind of the ending in status.json. "error" unless a subclass or an instance sets it.
    """

    code = FAILED
    cause = "error"


class ConfigError(RunError):
    """Raised for wrong input, in most cases before anything is started or written.

    Args:
        problems: All problems, at least one, in the order in which they were found.
        code: Exit code.

    Attributes:
        problems, code: The arguments.
        lines: Printed lines, each `error: <problem>`, without duplicates. `str` joins them.
    """

    cause = "config"

    def __init__(self, problems: list[ConfigIssue], code: int = BAD_CONFIG):
        self.problems = problems
        self.lines = [*dict.fromkeys(f"error: {problem}" for problem in problems)]
        super().__init__("\n".join(self.lines))
        self.code = code

    @classmethod
    def of(
        cls, key: str, value: object, message: str, hint: str = "", code: int = BAD_CONFIG
    ) -> ConfigError:
        """Return a ConfigError with one problem, see ConfigIssue."""
        return cls([ConfigIssue(key, value, message, hint)], code)


class DataError(RunError, ValueError):
    """Raised for data that is empty, damaged or does not fit the run. The exit code is 65."""

    code = BAD_DATA
    cause = "data"


class JobFailedError(RunError):
    """Raised after a job has failed, or was asked to stop, and the reason has been printed.

    A job is a run, or one run of a sweep. The arguments are the attributes.

    Attributes:
        code: Exit code of the job.
        message: Printed line or lines of the job's error. Empty if they are not known.
    """

    def __init__(self, code: int, message: str):
        super().__init__(code, message)  # pickle passes these arguments to __init__ again
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Ending:
    """How a command, or one of its ranks, ended.

    Attributes:
        code: Exit code.
        cause: Kind of the ending for status.json, such as "data".
        line: Printed message. A ConfigError with several problems has several lines.
        trace: Traceback, or an empty string if the message explains the error.
    """

    code: int
    cause: str
    line: str
    trace: str = ""


def ending_of(error: BaseException, doing: str = "") -> Ending:
    """Return how a command or a rank ends after an exception: exit code, cause and message.

    A RunError gives its own code and cause. For other exceptions the type and the text decide. An
    exception of an unknown kind gives the code 70, the cause "error" and a traceback. The function
    prints nothing and raises nothing.

    Args:
        error: Exception that ends the command or the rank.
        doing: Current activity, such as "step 12", which the message of an unknown kind names.
    """
    message = first_line(error)
    cause: str = getattr(error, "cause", "") if hasattr(type(error), "cause") else ""
    if cause and (code := getattr(error, "code", None)):
        is_told = isinstance(error, ConfigError) or code == PREEMPTED
        return Ending(code, cause, str(error) if is_told else f"error: {message}")
    if isinstance(error, KeyboardInterrupt):
        return Ending(INTERRUPTED, "interrupted", "interrupted")
    if isinstance(error, OSError) and (cause == "disk" or error.errno in _DISK):
        message = message if cause else f"{type(error).__name__}: {message}"
        return Ending(code_of(error), "disk", f"error: {message}")
    if isinstance(error, ModuleNotFoundError) and "." not in (error.name or ""):  # a whole package
        hint = f"pip install {error.name}" if error.name else ""
        return Ending(BAD_CONFIG, "config", f"error: {ConfigIssue('', None, message, hint)}")
    trace = "".join(traceback.format_exception(error))
    for cause, (phrases, what) in _PHRASES.items():
        is_phrase = isinstance(error, RuntimeError) and re.search(phrases, str(error))
        if is_phrase or (cause == "memory" and isinstance(error, MemoryError)):
            code, trace = HUNG if cause == "hang" else FAILED, trace if cause == "memory" else ""
            return Ending(code, cause, f"error: {what}: {message}", trace)
    line = f"error: {type(error).__name__}: {message}" + (f"; at {doing}" if doing else "")
    return Ending(FAILED, "error", line, trace)
