"""stdout and stderr of a process, which may be closed, be lost, or know ASCII alone.

They are closed by `>&-`, and lost by `| head` or on a full disk.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, cast

from gptrain.core.errors import printable

_python_format = warnings.formatwarning


class Stream:
    """A text stream that writes what can be written.

    A character that the stream's encoding does not have becomes a question mark. Text that can no
    longer be written is discarded: silently where the reader has gone, as in any filter, and with
    one warning after any other failure.

    Attributes:
        error: the first failure of another kind than a closed pipe.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.error = stream, None

    def write(self, text: str) -> int:
        """Write a text and return its length in characters."""
        try:
            self._attempt(self._stream.write, text)
        except UnicodeEncodeError as error:
            text = text.encode(error.encoding, errors="replace").decode(error.encoding)
            self._attempt(self._stream.write, text)
        return len(text)

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
    """Wrap stdout and stderr of this process, so that nothing that is printed raises."""
    warnings.formatwarning = cast(Any, format_warning)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed by who started this process
            _discard(number)
            stream = os.fdopen(number, "w", closefd=False)
        if not isinstance(stream, Stream):
            setattr(sys, name, Stream(stream))


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning about the user's input as one line, and another one in Python's form."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parent):
        return f"warning: {printable(message)}\n"
    return _python_format(message, category, filename, lineno, line)


def _discard(number: int) -> None:
    """Points a file descriptor to a file that keeps nothing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
