"""How a job ended, as one of the exit codes."""

from __future__ import annotations


class JobFailed(Exception):
    """A job that is not done.

    Attributes:
        code: the exit code.
    """

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
