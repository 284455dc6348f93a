"""What is wrong with a run, and the exit code that says so."""

from __future__ import annotations

import argparse
import errno
import re
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

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
    """What an exit code means, and what follows from it.

    Attributes:
        meaning: A few words for a person.
        is_restarted: A restart may cure the fault: the supervisor starts the ranks again, and a
            batch script requeues its job, at most `launcher.max_restarts` times.
        is_requeued: The run was asked to stop and resumes later: a batch script always requeues it.
        ends_ranks: The other ranks end when one rank has recorded this code.
        ends_sweep: The user or the scheduler wants to stop everything, so no further job starts.
    """

    meaning: str
    is_restarted: bool = False
    is_requeued: bool = False
    ends_ranks: bool = True
    ends_sweep: bool = False


# The numbers above 128 are what a shell reports of a process that was ended by signal number - 128.
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
    NON_FINITE: ExitCode("loss not finite"),
    INTERRUPTED: ExitCode("interrupted twice", ends_sweep=True),
    128 + 9: ExitCode("SIGKILL, often for want of memory", is_restarted=True),
    128 + 11: ExitCode("SIGSEGV", is_restarted=True),
    # A run that is still importing does not save when its job is preempted or its time is up.
    128 + 10: ExitCode("SIGUSR1 before the start", is_requeued=True),
    128 + 15: ExitCode("SIGTERM before the start", is_requeued=True),
}
UNKNOWN = ExitCode("a code that gptrain does not return")


def exit_code(code: int) -> ExitCode:
    """Return what follows from an exit code, for a code of another program UNKNOWN."""
    return EXIT_CODES.get(code, UNKNOWN)


UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
DISK = (*UNUSABLE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
LONGEST_VALUE = 200  # characters of a value that are shown

# Our own exceptions have a `cause` of their class.
CODES = {"preempted": PREEMPTED, "nonfinite": NON_FINITE, "data": BAD_DATA, "hang": HUNG}

# Of gloo and nccl, about a rank that is gone.
PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
OUT_OF_MEMORY = ("can't allocate memory", "out of memory")  # torch, on a CPU and on a GPU
TIMED_OUT = ("Timed out waiting", "timed out after", "Watchdog caught collective")  # gloo, nccl


@dataclass(frozen=True)
class ConfigIssue:
    """One wrong input: `error: <key>=<value>: <wrong>; allowed: <allowed>; try: <attempt>`.

    Attributes:
        value: as given; None where there is nothing to show, "null" for a null that was given.
        code: the exit code; 0 where it is a warning only.
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
        """What is printed."""
        return f"{'error' if self.code else 'warning'}: {self}"


def show(value: object) -> str:
    """A value as one would type it."""
    if isinstance(value, bool) or value is None:
        text = {True: "true", False: "false", None: "null"}[value]
    elif isinstance(value, list):
        text = f"[{','.join(show(item) for item in value)}]"
    elif isinstance(value, dict):
        text = "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def printable(text: object) -> str:
    """A text on one line; what a terminal would obey is shown as its escape."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def quoted(text: str) -> str:
    """A text in Hydra's quotes, as it is: no reference, no list, no number."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # what OmegaConf takes for a reference
    # Hydra reads a backslash as one, but in front of a quote.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + m[2].replace("'", "\\'"), text) + "'"


def code_of(error: OSError) -> int:
    """The exit code of what the file system refused."""
    if error.errno is None:
        return FAILED
    return FOLDER_UNUSABLE if error.errno in UNUSABLE else IO_ERROR


def first_line(error: object) -> str:
    """The first line of a message, and the next where the first only says where."""
    text = re.sub(r"\btensor\([^()]*(?:\([^()]*\)[^()]*)*\)", "tensor(…)", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__


class ConfigError(Exception):
    """All that is wrong with a run, found before anything was started or written.

    Attributes:
        problems: every `ConfigIssue`, in the order found.
        code: the exit code; 2 where any of the problems is one of the config itself.
    """

    def __init__(self, problems: list[ConfigIssue]):
        self.problems = problems
        super().__init__("\n".join(self.lines))
        codes = [problem.code for problem in problems]
        self.code = BAD_CONFIG if BAD_CONFIG in codes else codes[0]

    @property
    def lines(self) -> list[str]:
        """What is printed of it, a line for each problem."""
        return list(dict.fromkeys(problem.line for problem in self.problems))

    @classmethod
    def of(cls, key: str, value: object, message: str, **more: Any) -> ConfigError:
        """With one Problem."""
        return cls([ConfigIssue(key, value, message, **more)])


class Parser(argparse.ArgumentParser):
    """Parser of a command's words, which raises a ConfigError for what it cannot read."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words, none of which may end with the carriage return of a Windows script."""
        words = sys.argv[1:] if args is None else args
        if found := [word for word in words if word.endswith("\r")]:
            key, equals, value = found[0].partition("=")
            message = "ends with a carriage return: the script has Windows line endings"
            hint = "dos2unix <script>, or sed -i 's/\\r$//' <script>"
            if not equals:
                message, key = f"{found[0]}: {message}", ""
            raise ConfigError.of(key.lstrip("+~"), value if equals else None, message, hint=hint)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError.of("", None, message, hint=f"{self.prog} --help")


class JobFailedError(Exception):
    """A job that started and is not done; its own report has been printed.

    Attributes:
        code: the exit code.
    """

    def __init__(self, code: int, message: str):
        super().__init__(code, message)  # as it is made again in another process
        self.code, self.message = code, message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Ending:
    """What became of a command, or of one rank of it.

    Attributes:
        cause: one word: done, preempted, nonfinite, hang, killed, config, data, disk, interrupted,
            peer, memory, error.
        line: for a person; one, but for a config with several problems.
        trace: the traceback, where only the code can explain it.
        rank: whose fault it is, where that is known to be another than the one that reports.
    """

    code: int
    cause: str
    line: str
    trace: str = ""
    rank: int | None = None


def ending_of(error: BaseException, doing: str = "") -> Ending:
    """The ending that an exception means.

    Args:
        doing: where the run was, said where nothing else says it.
    """
    said, rank = first_line(error), getattr(error, "rank", None)
    cause = getattr(type(error), "cause", None)
    if cause in CODES:
        line = said if cause == "preempted" else f"error: {said}"
        return Ending(CODES[cause], cause, line, rank=rank)
    match error:
        case ConfigError():
            return Ending(error.code, "config", str(error))
        case OSError() if cause == "disk" or error.errno in DISK:
            said = said if cause else f"{type(error).__name__}: {said}"
            return Ending(code_of(error), "disk", f"error: {said}", rank=rank)
        case ModuleNotFoundError() if "." not in (error.name or ""):  # no module of a package
            hint = f"pip install {error.name}" if error.name else ""
            missing = ConfigIssue("", None, said, hint=hint)
            return Ending(BAD_CONFIG, "config", missing.line)
        case KeyboardInterrupt():
            return Ending(INTERRUPTED, "interrupted", "interrupted")
        case RuntimeError() if _has(TIMED_OUT, error):
            return Ending(HUNG, "hang", f"error: a collective timed out: {said}")
        case RuntimeError() if _has(PEER_GONE, error):
            return Ending(FAILED, "peer", f"error: another rank is gone: {said}")
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, MemoryError) or _has(OUT_OF_MEMORY, error):
        return Ending(FAILED, "memory", f"error: out of memory: {said}", trace)
    line = f"error: {type(error).__name__}: {said}" + (f"; at {doing}" if doing else "")
    return Ending(FAILED, "error", line, trace)


def _has(phrases: tuple[str, ...], error: BaseException) -> bool:
    return any(phrase in str(error) for phrase in phrases)
