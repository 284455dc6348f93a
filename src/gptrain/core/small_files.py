"""The one reader of small JSON and YAML files, which may be damaged, or none of ours."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml


class DataError(ValueError):
    """Data that is empty, damaged or does not fit; the message names the file and both sides."""

    cause = "data"


class UnreadableFileError(DataError):
    """A small file that is there and cannot be used; the message names it and says why."""

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = Path(path), reason


def read_bytes(path: str | os.PathLike) -> bytes:
    """The content of a regular file. Raises: as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """A regular file to read; a link to one is followed.

    Raises: FileNotFoundError; OSError; UnreadableFileError for a pipe or a device.
    """
    # Without O_NONBLOCK to open a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnreadableFileError(path, "not a regular file")


def read_json(path: str | Path) -> Any:
    """The value of a small JSON file. Raises: FileNotFoundError, OSError, UnreadableFileError."""
    text = read_bytes(path)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise UnreadableFileError(path, f"not JSON ({error})") from None


def read_yaml(path: str | Path) -> Any:
    """Plain values of a small YAML file. Raises: FileNotFoundError, OSError,
    UnreadableFileError.
    """
    text = read_bytes(path)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableFileError(path, f"not YAML ({str(error).splitlines()[0]})") from None


def read_facts(path: str | Path, read: Callable[[str | Path], Any] = read_json) -> dict[str, Any]:
    """The mapping in a small file; an empty one where there is none that can be read."""
    with suppress(OSError, UnreadableFileError):
        if isinstance(values := read(path), dict):
            return values
    return {}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested dicts; an empty one is a value."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    inner = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in values.items())
    return {key: value for one in inner for key, value in one.items()}
