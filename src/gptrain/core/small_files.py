"""Readers of small JSON and YAML files that may be damaged or written by another program."""

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gptrain.core.errors import DataError, first_line, printable


class UnreadableFileError(DataError):
    """Raised for the file `path`, which exists but cannot be used, for the `reason`."""

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(path, reason)  # pickle calls the class with these arguments
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


def read_bytes(path: str | os.PathLike) -> bytes:
    """Return the content of a regular file, with the errors of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading in binary mode. Symbolic links are followed.

    Raises:
        OSError: If the file does not exist or cannot be opened.
        UnreadableFileError: If the path is a pipe, a device or a folder.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnreadableFileError(path, "not a regular file")


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file. Raises as `open_regular`; UnreadableFileError if damaged."""
    return _read(path, "JSON", json.loads)


def read_yaml(path: str | Path) -> Any:
    """Return the value of a YAML file. Raises as `read_json`, also for a tag of a Python object."""
    return _read(path, "YAML", yaml.safe_load)


def _read(path: str | Path, kind: str, parse: Callable[[bytes], Any]) -> Any:
    content = read_bytes(path)
    try:
        return parse(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also if not UTF-8
        raise UnreadableFileError(path, f"not {kind} ({first_line(error)})") from None


def read_facts(path: str | Path, read: Callable[[str | Path], Any] = read_json) -> dict[str, Any]:
    """Return the mapping in a JSON file, or an empty dict if it is missing, damaged or has none.

    `read_yaml` as `read` reads a YAML file.
    """
    with suppress(OSError, UnreadableFileError):
        if isinstance(values := read(path), dict):
            return values
    return {}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return a flat dict from dotted key to value, for nested dicts.

    Every key begins with the prefix, if one is given. An empty dict within `values` counts as a
    value. For `values` that are no dict the key is the prefix; without one the result is empty.
    """
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    inner = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in values.items())
    return {key: value for items in inner for key, value in items.items()}
