"""Errors of a run, the lines that are printed for them, and exit codes.

`ConfigError` holds the problems of a config. `ending_of` turns any other exception into an exit
code, a cause and a printed line.
"""

from __future__ import annotations

import errno
import re
import traceback
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class ExitCode:
    """Meaning of an exit code, and how gptrain reacts to it.

    Attributes:
        meaning: Description of a few words.
        is_restarted: True if a restart may help. Local ranks are then started again, and a batch
            script requeues its job, at most `launcher.max_restarts` times.
        is_requeued: True if the run was asked to stop and resumes later. A batch script then always
            requeues its job.
        ends_ranks: True if the other ranks end when one rank has recorded this code.
        ends_sweep: True if a sweep starts no further job, because the user or the scheduler wants
            to stop.
    """

    meaning: str
    is_restarted: bool = False
    is_requeued: bool = False
    ends_ranks: bool = True
    ends_sweep: bool = False


# An exit code above 128 means that signal number (code - 128) ended the process.
EXIT_CODES = {
    DONE: ExitCode("done", ends_ranks=False),
    BAD_CONFIG: ExitCode("bad config"),
    BAD_DATA: ExitCode("bad data or checkpoint"),
    INPUT_NOT_FOUND: ExitCode("input not found"),
    FAILED: ExitCode("any other failure", is_restarted=True),
    FOLDER_UNUSABLE: ExitCode("folder unusable"),
    IO_ERROR: ExitCode("I/O error or disk full"),
    PREEMPTED: ExitCode("saved on request", is_requeued=True, ends_ranks=False, ends_sweep=True),
    HUNG: ExitCode("a rank hung", is_restarted=True),
    NON_FINITE: ExitCode("loss not finite, or too many spikes"),
    INTERRUPTED: ExitCode("interrupted twice", ends_sweep=True),
    128 + 9: ExitCode("SIGKILL, often sent when memory is full", is_restarted=True),
    128 + 11: ExitCode("SIGSEGV", is_restarted=True),
    # During the imports a run has no signal handlers yet, so it ends without a checkpoint when its
    # job is preempted or reaches its time limit.
    128 + 10: ExitCode("SIGUSR1 before the start", is_requeued=True),
    128 + 15: ExitCode("SIGTERM before the start", is_requeued=True),
}
UNKNOWN = ExitCode("a code that gptrain does not return")


def exit_code(code: int) -> ExitCode:
    """Return the entry of an exit code in EXIT_CODES, or UNKNOWN for a code that is not there."""
    return EXIT_CODES.get(code, UNKNOWN)


UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
DISK = (*UNUSABLE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
LONGEST_VALUE = 200  # characters of a value in an error message


@dataclass(frozen=True)
class Cause:
    """Consequences of one cause, for example `data`, by which a command or a rank can end.

    An exception class of gptrain names its cause in its class attribute `cause`.

    Attributes:
        code: Exit code of these exception classes. None if `ending_of` has to look at the exception
            itself.
    """

    code: int | None = None


CAUSES = {
    "done": Cause(),
    "preempted": Cause(PREEMPTED),  # the step was saved before the exception was raised
    "interrupted": Cause(),
    "config": Cause(),
    "data": Cause(BAD_DATA),
    "disk": Cause(),  # also an OSError of a dataset
    "memory": Cause(),
    "nonfinite": Cause(NON_FINITE),
    "spike": Cause(NON_FINITE),
    "hang": Cause(HUNG),
    "killed": Cause(),
    "peer": Cause(),  # another rank has exited
    "error": Cause(),  # any other exception
}

# Parts of error messages of gloo and NCCL after another rank has exited.
PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
# The part of CUDA's message that helps. Other processes and settings of the allocator follow it.
CUDA_MEMORY = re.compile(r"CUDA out of memory\. (.* is free)\..*")
# Parts of error messages of torch when memory runs out, on a CPU and on a GPU.
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
# First line of an error that torch raises again for a data worker.
IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process")
# Parts of error messages of gloo and NCCL after the timeout of a collective.
TIMED_OUT = ("Timed out waiting", "timed out after", "Watchdog caught collective")


@dataclass(frozen=True)
class ConfigIssue:
    """One problem of the input: `<key>=<value>: <message>; allowed: <allowed>; try: <hint>`.

    Attributes:
        key: Dotted key, flag or environment variable. Empty if the problem has no single key.
        value: Given value. None shows no value, the string "null" shows a null.
        message: Reason why the value is wrong.
        allowed: Values that are allowed, or an empty string.
        hint: Override or command to type instead, or an empty string.
        code: Exit code of the command. DONE (0) makes the problem a warning.
    """

    key: str
    value: object
    message: str
    allowed: str = ""
    hint: str = ""
    code: int = BAD_CONFIG

    def __str__(self) -> str:
        head = f"{self.key}={show(self.value)}" if self.value is not None else self.key
        line = f"{head}: {self.message}" if head else self.message
        line += f"; allowed: {self.allowed}" if self.allowed else ""
        line += f"; try: {self.hint}" if self.hint else ""
        return printable(line)

    @property
    def line(self) -> str:
        """Line to print: the problem after `error: `, or after `warning: ` if `code` is 0."""
        return f"{'error' if self.code else 'warning'}: {self}"


def show(value: object) -> str:
    """Return a value in the notation of a Hydra override, for an error message.

    Strings are not quoted. A text longer than LONGEST_VALUE characters is cut and ends with "...".

    Args:
        value: String, number, bool, None, or nested lists and dicts of them.
    """
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = "true" if value else "false"
    elif isinstance(value, list):
        text = f"[{','.join(show(item) for item in value)}]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def printable(text: object) -> str:
    """Return a text on one line, with the escape sequence of each character that is not printable.

    These are all characters for which `str.isprintable` is False: control characters such as line
    feeds, but also spaces other than " ", such as a no-break space.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def code_of(error: OSError) -> int:
    """Return the exit code for an error of the operating system.

    The code is FOLDER_UNUSABLE (73) for missing permissions, a read-only file system or a path that
    is no folder, FAILED (70) for an OSError without an error number, and otherwise IO_ERROR (74).
    """
    if error.errno is None:
        return FAILED
    return FOLDER_UNUSABLE if error.errno in UNUSABLE else IO_ERROR


def first_line(error: object) -> str:
    """Return the first line of an exception's message, or the name of its type without a message.

    If the first line ends with a colon, the second line is added. The values of tensors are left
    out. An error that torch raises again for a DataLoader worker has the traceback of the worker as
    its message: the result is then the last line, the message of the original error.

    Args:
        error: Exception, or any object with a text.
    """
    text = re.sub(r"\btensor\([^()]*(?:\([^()]*\)[^()]*)*\)", "tensor(…)", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and IN_WORKER.match(lines[0]):
        lines = [lines[-1].rpartition(f"{type(error).__name__}: ")[2]]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


class ConfigError(Exception):
    """Raised for wrong input. Nothing was started or written, unless a restart finds the problem.

    Attributes:
        problems: All problems, in the order in which they were found. Warnings may be among them,
            but at least one is an error.
        code: Exit code: 2 if one of the problems has it, else that of the first error.
    """

    def __init__(self, problems: list[ConfigIssue]):
        self.problems = problems
        super().__init__("\n".join(self.lines))
        codes = [problem.code for problem in problems if problem.code != DONE]
        self.code = BAD_CONFIG if BAD_CONFIG in codes else codes[0]

    @property
    def lines(self) -> list[str]:
        """Printed lines: one for each problem, without duplicates."""
        return list(dict.fromkeys(problem.line for problem in self.problems))

    @classmethod
    def of(cls, key: str, value: object, message: str, **more: Any) -> ConfigError:
        """Return a ConfigError with a single problem.

        Args:
            key: Dotted key, or an empty string.
            value: Given value, or None.
            message: Reason why the value is wrong.
            more: Other attributes of ConfigIssue: `allowed`, `hint`, `code`.
        """
        return cls([ConfigIssue(key, value, message, **more)])


class DataError(ValueError):
    """Raised for data that is empty, damaged or does not fit the run.

    A run that raises this error ends with exit code 65.
    """

    cause = "data"


class JobFailedError(Exception):
    """Raised after a job failed and its error was printed. A job is a run, or one run of a sweep.

    Attributes:
        code: Exit code of the job.
        message: Error message of the job.
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
        cause: Kind of the ending, a key of CAUSES.
        line: Printed message. It has several lines only for a config with several problems.
        trace: Traceback, or an empty string if the message explains the error.
        rank: Rank that caused the error, if the exception names it. None otherwise.
    """

    code: int
    cause: str
    line: str
    trace: str = ""
    rank: int | None = None


def ending_of(error: BaseException, doing: str = "") -> Ending:
    """Return how a command or a rank ends after an exception: exit code, cause and message.

    The class attribute `cause` of the exception decides, if CAUSES has an exit code for it.
    Otherwise the type and the text of the exception decide: a ConfigError, an OSError of the disk,
    a missing package, an interrupt, an error of a collective, or memory that ran out. Any other
    exception ends with code FAILED (70), and its traceback is part of the result.

    Args:
        error: Exception that ended the command or the rank.
        doing: Phase or step that the run was in. It is printed with an exception of unknown cause.
    """
    message = first_line(error)
    rank = getattr(error, "rank", None)
    cause: str = getattr(type(error), "cause", "")
    code = CAUSES[cause].code if cause in CAUSES else None
    if code is not None:
        line = message if cause == "preempted" else f"error: {message}"
        return Ending(code, cause, line, rank=rank)
    match error:
        case ConfigError():
            return Ending(error.code, "config", str(error))
        case OSError() if cause == "disk" or error.errno in DISK:
            message = message if cause else f"{type(error).__name__}: {message}"
            return Ending(code_of(error), "disk", f"error: {message}", rank=rank)
        case ModuleNotFoundError() if "." not in (error.name or ""):  # a whole package is missing
            hint = f"pip install {error.name}" if error.name else ""
            missing = ConfigIssue("", None, message, hint=hint)
            return Ending(BAD_CONFIG, "config", missing.line)
        case KeyboardInterrupt():
            return Ending(INTERRUPTED, "interrupted", "interrupted")
        case RuntimeError() if _has(TIMED_OUT, error):
            return Ending(HUNG, "hang", f"error: a collective timed out: {message}")
        case RuntimeError() if _has(PEER_GONE, error):
            return Ending(FAILED, "peer", f"error: another rank has exited: {message}")
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError) or _has(OUT_OF_MEMORY, error):
        message = CUDA_MEMORY.sub(r"\1", message)
        return Ending(FAILED, "memory", f"error: out of memory: {message}", trace)
    line = f"error: {type(error).__name__}: {message}" + (f"; at {doing}" if doing else "")
    return Ending(FAILED, "error", line, trace)


def _has(phrases: tuple[str, ...], error: BaseException) -> bool:
    """Return whether the message of an exception contains one of the phrases."""
    return any(phrase in str(error) for phrase in phrases)
