"""What is wrong with a run, and the exit code that says so."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Problem:
    """One wrong input: `error: <key>=<value>: <wrong>; allowed: <allowed>; try: <attempt>`."""

    key: str
    value: object
    wrong: str
    allowed: str = ""
    attempt: str = ""
    code: int = BAD_CONFIG

    def __str__(self) -> str:
        head = f"{self.key}={self.value}" if self.value is not None else self.key
        line = f"{head}: {self.wrong}" if head else self.wrong
        line += f"; allowed: {self.allowed}" if self.allowed else ""
        line += f"; try: {self.attempt}" if self.attempt else ""
        return " ".join(line.split())


class ConfigError(Exception):
    """All that is wrong with a run, found before anything was started or written.

    Attributes:
        problems: every `Problem`, in the order found.
        code: the exit code; 2 where any of the problems is one of the config itself.
    """

    def __init__(self, problems: list[Problem]):
        super().__init__("\n".join(f"error: {problem}" for problem in problems))
        self.problems = problems
        codes = [problem.code for problem in problems]
        self.code = BAD_CONFIG if BAD_CONFIG in codes else codes[0]


class JobFailed(Exception):
    """A job that started and is not done; its own report has been printed.

    Attributes:
        code: the exit code.
    """

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
