"""stdout and stderr of a process that may be closed (`>&-`), or lost (`| head`, a full disk)."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from gptrain.problems import printable


class Stream:
    """A text stream that discards what can no longer be written.

    A reader that has gone is silence, as of any filter; any other failure is one warning.

    Attributes:
        error: the first failure of another kind than a closed pipe.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.error = stream, None

    def write(self, text: str) -> int:
        return self._attempt(self._stream.write, text) or len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, call: Any, *args: str) -> Any:
        try:
            return call(*args)
        except OSError as error:
            _discard(self._stream.fileno())
            if not isinstance(error, BrokenPipeError) and self.error is None:
                self.error = error
                print(f"warning: {self.name}: {error.strerror}, discarded", file=sys.stderr)


class Lines(logging.Formatter):
    """Of a log: what a terminal would obey, in somebody else's name say, is shown as its escape."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


def bear_lost_streams() -> None:
    """Lets stdout and stderr of this process be closed, or be lost while it runs."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started this process
            _discard(number)
            stream = os.fdopen(number, "w", closefd=False)
        if not isinstance(stream, Stream):
            setattr(sys, name, Stream(stream))


def _discard(number: int) -> None:
    """Points a file descriptor to a file that keeps nothing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
