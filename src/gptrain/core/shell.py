"""Commands as text that can be pasted into a shell, from the folder in which they are printed.

Every command that the program prints is made here. A value passes two readers: the shell, and for
an override Hydra's grammar. `override` quotes for Hydra, `command` quotes each word for the shell.
"""

from __future__ import annotations

import os
import re
import shlex

from gptrain.core import locations
from gptrain.core.errors import quoted, show

# Texts that Hydra reads as themselves: no number, no sweep, no quote, nothing that a shell reads.
PLAIN = r"(\.{0,2}/|[A-Za-z_])[\w/.:-]*"
CONSTANTS = {"null", "true", "false", "nan", "inf"}  # texts that Hydra reads as another type


def override(key: str, value: object) -> str:
    """Return `key=value` in the grammar of Hydra's overrides; a text stays the text that it is.

    The result is one word of a command line. It is not quoted for the shell yet.
    """
    if not isinstance(value, str | os.PathLike):
        return f"{key}={show(value)}"
    text = str(value)
    is_plain = re.fullmatch(PLAIN, text, re.ASCII) and text.lower() not in CONSTANTS
    return f"{key}={text if is_plain else quoted(text)}"


def command(*words: str) -> str:
    """Return the words as one line, each quoted for a POSIX shell where it needs quotes."""
    return " ".join(map(_shell_word, words))


def train_command(*overrides: str) -> str:
    """Return the line that starts the project's train.py with these overrides."""
    return command("python", locations.train_script(), *overrides)


def option(key: str, value: object) -> str:
    """Return one override quoted for Hydra and for the shell, for a `try:` of an error message."""
    return command(override(key, value))


def folder_argument(path: str | os.PathLike) -> str:
    """Return a path that no program takes for an option, or for somebody's home folder."""
    text = str(path)
    return f"./{text}" if text.startswith(("-", "~")) else text


def _shell_word(word: str) -> str:
    if not word.isprintable():  # bash's $'…' keeps a line feed in the line
        return "$'" + "".join(map(_escape, word)) + "'"
    # Double quotes where they change nothing: single quotes inside of single ones are unreadable.
    if "'" in word and not re.search(r'["$`\\!]', word):
        return f'"{word}"'
    return shlex.quote(word)


def _escape(char: str) -> str:
    """Return a character as it is written inside of bash's $'…'."""
    if char.isprintable():
        return f"\\{char}" if char in "\\'" else char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
