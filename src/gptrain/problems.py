"""What is wrong with a run, and the exit code that says so."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from gptrain.resilience.status import (
    BAD_CONFIG,
    BAD_DATA,
    DONE,
    FAILED,
    FOLDER_UNUSABLE,
    HUNG,
    INPUT_NOT_FOUND,
    INTERRUPTED,
    IO_ERROR,
    NON_FINITE,
    PREEMPTED,
)

__all__ = [
    "BAD_CONFIG", "BAD_DATA", "DISK", "DONE", "FAILED", "FOLDER_UNUSABLE", "HUNG",
    "INPUT_NOT_FOUND", "INTERRUPTED", "IO_ERROR", "NON_FINITE", "PREEMPTED", "ConfigError",
    "JobFailed", "Problem", "code_of", "show",
]  # fmt: skip

UNUSABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
DISK = (*UNUSABLE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
LONGEST_VALUE = 200  # characters of a value that are shown


@dataclass(frozen=True)
class Problem:
    """One wrong input: `error: <key>=<value>: <wrong>; allowed: <allowed>; try: <attempt>`.

    Attributes:
        value: as given; None where there is nothing to show, "null" for a null that was given.
        code: the exit code; 0 where it is a warning only.
    """

    key: str
    value: object
    wrong: str
    allowed: str = ""
    attempt: str = ""
    code: int = BAD_CONFIG

    def __str__(self) -> str:
        head = f"{self.key}={show(self.value)}" if self.value is not None else self.key
        line = f"{head}: {self.wrong}" if head else self.wrong
        line += f"; allowed: {self.allowed}" if self.allowed else ""
        line += f"; try: {self.attempt}" if self.attempt else ""
        return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)

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


def code_of(error: OSError) -> int:
    """The exit code of what the file system refused."""
    if error.errno is None:
        return FAILED
    return FOLDER_UNUSABLE if error.errno in UNUSABLE else IO_ERROR


class ConfigError(Exception):
    """All that is wrong with a run, found before anything was started or written.

    Attributes:
        problems: every `Problem`, in the order found.
        code: the exit code; 2 where any of the problems is one of the config itself.
    """

    def __init__(self, problems: list[Problem]):
        super().__init__("\n".join(problem.line for problem in problems))
        self.problems = problems
        codes = [problem.code for problem in problems]
        self.code = BAD_CONFIG if BAD_CONFIG in codes else codes[0]

    @classmethod
    def of(cls, key: str, value: object, wrong: str, **more: object) -> ConfigError:
        """With one Problem."""
        return cls([Problem(key, value, wrong, **more)])


class JobFailed(Exception):
    """A job that started and is not done; its own report has been printed.

    Attributes:
        code: the exit code.
    """

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
