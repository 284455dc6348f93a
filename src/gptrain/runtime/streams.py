"""stdout and stderr of a process that must go on if they cannot be written.

They may be closed (`>&-`), broken or limited to ASCII. A stream breaks when the reader of a pipe
ends (`| head`) or when a disk is full.
"""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from gptrain.core.errors import DONE, ending_of, printable
from gptrain.core.locations import LIBRARY

log = logging.getLogger(__name__)
_python_format = warnings.formatwarning


class RunStream:
    """Wrapper of stdout or stderr with which a run continues when its output cannot be written.

    After the first failed write all output is discarded. A warning in the log reports that, unless
    the stream is a pipe whose reader has ended (`| head`).

    Args:
        stream: Text stream, such as sys.stdout.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text and return its length in characters, also if the output is discarded.

        Args:
            text: Text to write.
        """
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text, unless output is discarded."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, call: Callable, *args: str) -> None:
        """Call a method of the stream. If it raises an OSError, discard all output from now on.

        Args:
            call: Method of the stream.
            args: Arguments of the method.
        """
        try:
            call(*args)
        except OSError as error:
            _discard(self._stream.fileno())
            if not isinstance(error, BrokenPipeError):
                log.warning("warning: %s: %s, discarded", self._stream.name, error.strerror)


class Lines(logging.Formatter):
    """Formatter of log records that shows control characters as escapes, except for line ends.

    A message cannot then change the terminal or forge a line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, which may have several lines.

        Args:
            record: Record of a logger.
        """
        return "\n".join(map(printable, super().format(record).split("\n")))


def prepare_streams(is_run: bool) -> None:
    """Make stdout and stderr of this process safe to write to, and shorten gptrain's warnings.

    A closed stream (`>&-`) becomes /dev/null, so that no other file gets its number. A character
    that the stream's encoding does not have becomes a question mark. A warning of gptrain is
    printed as one line.

    Args:
        is_run: Whether this process trains. A training continues if its output cannot be written.
            Any other command is ended by SIGPIPE when the reader of a pipe has ended, as usual on
            Unix.
    """
    warnings.formatwarning = cast(Any, format_warning)
    if not is_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            _discard(number)
            stream = os.fdopen(number, "w", closefd=False)
        if stream.errors == "strict":
            stream.reconfigure(errors="replace")
        is_prepared = isinstance(stream, RunStream)
        setattr(sys, name, RunStream(stream) if is_run and not is_prepared else stream)


def flush_output() -> int:
    """Flush stdout at the end of a command, and return the exit code of the command.

    The code is 0, or that of the error if the output cannot be written, for example to a full disk.
    The error is printed on stderr. If stdout is a RunStream, as in a training, the code is always
    0, because a RunStream discards output that cannot be written.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout.fileno())  # Python flushes again at exit
        ending = ending_of(error)
        print(ending.line, file=sys.stderr)
        return ending.code
    return DONE


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return the text of a warning: one line for a UserWarning of gptrain, else Python's form.

    `prepare_streams` sets it as `warnings.formatwarning`.

    Args:
        message: Warning or its text.
        category: Class of the warning.
        filename: File that has raised the warning.
        lineno: Line in the file.
        line: Source text of the line. None lets Python read it.
    """
    if category is UserWarning and Path(filename).is_relative_to(LIBRARY):
        return f"warning: {printable(message)}\n"
    return _python_format(message, category, filename, lineno, line)


def _discard(number: int) -> None:
    """Point a file descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
