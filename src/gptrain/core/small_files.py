"""Readers of small JSON and YAML files that may be damaged or written by another program."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gptrain.core.errors import DataError, first_line, printable


class UnreadableFileError(DataError):
    """Raised for a file that exists but cannot be used. Its `str` is `<path>: <reason>`.

    Attributes:
        path: Path of the file.
        reason: Phrase that names the fault.
    """

    def __init__(self, path: str | os.PathLike, reason: str):
        super().__init__(path, reason)  # pickle calls the class with these arguments
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


class _Loader(yaml.SafeLoader):
    """Loader of YAML without aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases")
        return super().compose_node(parent, index)


def read_bytes(path: str | os.PathLike) -> bytes:
    """Return the content of a regular file. The errors are those of `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading in binary mode. Symbolic links are followed.

    Raises:
        OSError: If the file does not exist or cannot be opened.
        UnreadableFileError: If the path is a pipe, a device or a folder.
    """
    if os.path.exists(path) and not os.path.isfile(path):  # a named pipe would wait for a writer
        raise UnreadableFileError(path, "not a regular file")
    return open(path, "rb")


def read_values(path: str | Path) -> Any:
    """Return the content of a file as plain Python values: YAML if its name ends with .yaml.

    Any other file is JSON. An empty YAML file gives None.

    Raises:
        OSError: If the file does not exist or cannot be opened.
        UnreadableFileError: If the path is no regular file, or if the content is not valid YAML or
            JSON. A YAML tag of a Python object is not valid: no code is run. Nor is an alias, with
            which a short file could stand for more values than fit into memory.
    """
    content, is_yaml = read_bytes(path), Path(path).suffix == ".yaml"
    try:
        return yaml.load(content, _Loader) if is_yaml else json.loads(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also if not UTF-8
        kind = "YAML" if is_yaml else "JSON"
        raise UnreadableFileError(path, f"not {kind} ({first_line(error)})") from None


def read_facts(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a JSON file, or in a YAML file if its name ends with .yaml.

    A file that is missing or damaged, or that holds another value, gives {}.
    """
    with suppress(OSError, UnreadableFileError):
        if isinstance(values := read_values(path), dict):
            return values
    return {}


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return a flat dict from dotted key to value: {"a": {"b": 1}} becomes {"a.b": 1}.

    With a prefix, every key is `<prefix>.<key>`. Lists and empty dicts are values. If `values` is
    such a value itself, the result is {prefix: values}, or {} without a prefix.
    """
    if not isinstance(values, dict) or not values:
        return {prefix: values} if prefix else {}
    inner = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in values.items())
    return {key: value for items in inner for key, value in items.items()}
