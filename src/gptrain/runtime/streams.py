"""What this process prints: the form of log lines and warnings, and characters of the terminal."""

import io
import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, cast

from gptrain.core.errors import printable
from gptrain.core.locations import LIBRARY

_python_format = warnings.formatwarning


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
    """Let stdout and stderr of this process print every character, and shorten gptrain's warnings.

    A character that the stream's encoding does not have becomes a question mark. A warning of
    gptrain is printed as one line.

    Args:
        is_run: Whether this process trains. Any other command is ended by SIGPIPE when the reader
            of a pipe has ended, as usual on Unix.
    """
    warnings.formatwarning = cast(Any, format_warning)
    if not is_run:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


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
