"""Parser of command lines, whose errors are those of gptrain."""

import argparse
import sys
from typing import Any, NoReturn

from gptrain.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises a ConfigError, where argparse would print usage and exit."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words of a command line, as argparse does.

        Args:
            args: Words of the command line. None stands for `sys.argv[1:]`.
            namespace: Object that gets the values. None stands for a new one.

        Returns:
            The namespace, and the list of words that are unknown.

        Raises:
            ConfigError: If argparse refuses a word, or if a word ends with a carriage return, which
                a script with Windows line endings adds to the last word of a line.
            SystemExit: After `--help`, whose text is printed.
        """
        words = sys.argv[1:] if args is None else args
        if windows_words := [word for word in words if word.endswith("\r")]:
            key, equals, value = windows_words[0].partition("=")
            message = "ends with a carriage return: the script has Windows line endings"
            hint = "dos2unix <script>, or sed -i 's/\\r$//' <script>"
            if not equals:
                message = f"{windows_words[0]}: {message}"
                key = ""
            raise ConfigError.of(key.lstrip("+~"), value if equals else None, message, hint=hint)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError with argparse's message, which suggests `--help`."""
        raise ConfigError.of("", None, message, hint="--help")
