"""The one reader of small JSON and YAML files, which somebody else may have written.

A run folder, a cache or a folder of weights may come from a stranger. A pipe in place of a file
would block the reader for ever, `/dev/zero` would fill the memory, deep nesting would overflow the
stack, and YAML's aliases grow exponentially. Each of these is one `UnreadableFile` here.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MAX_JSON_BYTES = 16 * 2**20  # an index of a million tensors; manifests here have kilobytes
MAX_YAML_BYTES = 2**20  # PyYAML reads about 100 kB/s


class DataError(ValueError):
    """Data that is empty, damaged or does not fit; the message names the file and both sides."""

    cause = "data"


class UnreadableFile(DataError):
    """A small file that is there and cannot be used; the message names it and says why."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = Path(path), reason


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most max_bytes bytes. A link to one is followed.

    Raises: FileNotFoundError; OSError; UnreadableFile for anything but a small regular file.
    """
    with open_regular(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes > max_bytes:
            raise UnreadableFile(path, f"{n_bytes} bytes; at most {max_bytes} are read")
        return file.read(n_bytes)


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file to read. Raises: FileNotFoundError; OSError; UnreadableFile: a pipe, ..."""
    # Without O_NONBLOCK to open a named pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnreadableFile(path, "not a regular file")


def read_json(path: str | Path) -> Any:
    """The value of a small JSON file. Raises: FileNotFoundError, OSError, UnreadableFile."""
    return parse_json(read_bytes(path, MAX_JSON_BYTES), path)


def parse_json(text: bytes, path: str | Path) -> Any:
    """The value of JSON text that was read from path. Raises: UnreadableFile."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UnreadableFile(path, "nested too deeply") from None
    except ValueError as error:  # also text that is not UTF-8
        raise UnreadableFile(path, f"not JSON ({error})") from None


def read_yaml(path: str | Path) -> Any:
    """Plain values of a small YAML file, which may have no aliases and no tags of Python's.

    Raises: FileNotFoundError, OSError, UnreadableFile.
    """
    text = read_bytes(path, MAX_YAML_BYTES)
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except RecursionError:
        raise UnreadableFile(path, "nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableFile(path, f"not YAML ({reason})") from None


def read_facts(path: str | Path, read: Callable[[str | Path], Any] = read_json) -> dict[str, Any]:
    """The mapping in a small file; an empty one where there is none that can be read."""
    with suppress(OSError, UnreadableFile):
        if isinstance(values := read(path), dict):
            return values
    return {}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value, of nested dicts; an empty one is a value."""
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    inner = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in values.items())
    return {key: value for one in inner for key, value in one.items()}


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)
