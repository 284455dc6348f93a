"""Makes the commands that the program prints, so that each can be pasted into a shell.

The commands are valid in the working directory of this process. Two programs parse an override:
first the shell, then Hydra. `override` quotes a value for Hydra, `command` quotes each word for
the shell, and `option` does both.
"""

import os
import re
import shlex
from collections.abc import Iterable

from gptrain.core import locations
from gptrain.core.errors import show

# Strings that need no quotes: Hydra parses them as strings, and a shell leaves them unchanged.
_PLAIN = r"(\.{0,2}/|[A-Za-z_])[\w/.:-]*"
_CONSTANTS = {"null", "true", "false", "nan", "inf"}  # words that Hydra does not parse as strings


def override(key: str, value: object) -> str:
    """Return `key=value` in the grammar of Hydra's overrides, one word, not quoted for the shell.

    Hydra parses a string or a path back to exactly the same string. Any other value is written by
    `errors.show`: strings inside lists and dicts are not quoted, and more than 200 characters are
    cut.
    """
    if not isinstance(value, str | os.PathLike):
        return f"{key}={show(value)}"
    text = str(value)
    is_plain = re.fullmatch(_PLAIN, text, re.ASCII) and text.lower() not in _CONSTANTS
    return f"{key}={text if is_plain else quoted(text)}"


def quoted(text: str) -> str:
    """Return a text in quotes, so that Hydra parses it as exactly this string."""
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # escape "${", which OmegaConf would resolve
    # Hydra unescapes backslashes in front of a quote only, so only those are doubled.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + m[2].replace("'", "\\'"), text) + "'"


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Return key -> text of the value for overrides such as `key=value`. The last one counts.

    The `+` or `++` of a new key is removed. A word without `=`, such as `~key`, gives "~key" -> "".
    """
    pairs = (word.partition("=") for word in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def command(*words: str) -> str:
    """Return the words as one line, each quoted for a POSIX shell where it needs quotes."""
    return " ".join(map(_shell_word, words))


def train_command(*overrides: str) -> str:
    """Return the shell command `python <script> <overrides>`. The script is `train_script()`.

    The overrides are words that `override` has quoted for Hydra. This function quotes them for the
    shell.
    """
    return command("python", locations.train_script(), *overrides)


def option(key: str, value: object) -> str:
    """Return `key=value`, quoted for Hydra and for the shell, for the hint (`try:`) of an error."""
    return command(override(key, value))


def _shell_word(word: str) -> str:
    """Return a word quoted for a POSIX shell, in double quotes where these are easier to read."""
    is_simple = "'" in word and not re.search(r'["$`\\!]', word)
    return f'"{word}"' if is_simple else shlex.quote(word)
