"""Files of a corpus, and their text in pieces, each marked by its split.

A document is a text file, or one record of a file of records. Plain text, and JSON lines and CSV,
also with gzip, need no package. Parquet files, JSON arrays and JSON lines compressed in another way
are read by the package `datasets` (extra `datasets`).
"""

import csv
import glob
import gzip
import io
import json
import os
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import fnmatch
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeAlias

from gptrain.core.errors import DataError, first_line
from gptrain.data.order import GOLDEN

Paths: TypeAlias = str | os.PathLike | Sequence[str | os.PathLike]
# Folders of the standard library with other packages and with tests. Some test files are
# deliberately not UTF-8.
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet",
    ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")  # only gzip is read without a package
# Unit of the split, so that few words lose their context at a cut. A net whose loss on all of
# Python's library is 1.34 has 1.33 on 2 % of it in such pieces (1.43 in those of 4 Ki, 1.39 of 16).
PIECE_CHARS = 2**13
_LINE_CHARS = 2**12  # a longer line may be cut between two pieces


class Piece(NamedTuple):
    """Some lines of one document, which are tokenized separately.

    `ends_part` is true if the following text belongs to another document or to the other set.
    """

    text: str
    is_val: bool
    ends_part: bool
    ends_document: bool


def find_files(path: Paths, keep: Callable[[str], bool], left_out: Collection[str]) -> list[Path]:
    """Return the files at a path, at the matches of a glob pattern, or at each entry of a list.

    `keep` decides on a file in a folder by its path in it; `left_out` are folders, by name or path.
    Hidden files of a folder are left out. Raises a FileNotFoundError for a path that is missing, an
    OSError for a folder that cannot be read, a DataError if no file is found.
    """
    files: dict[str, Path] = {}  # real path -> first path that leads to the file
    for given in [path] if isinstance(path, (str, os.PathLike)) else path:
        given = os.path.expanduser(given)
        names = [given] if os.path.exists(given) else sorted(glob.glob(given, recursive=True))
        if not names:
            raise FileNotFoundError(f"{given}: no such file or folder")
        for name in names:
            found = [Path(name)]
            if os.path.isdir(name):
                below = sorted(_walk(name, left_out), key=str)
                found = [file for file in below if keep(str(file.relative_to(name)))]
            for file in filter(Path.is_file, found):
                files.setdefault(os.path.realpath(file), file)
    if not files:
        raise DataError(f"{path}: no such file in it")
    return list(files.values())


def _walk(folder: str, left_out: Collection[str]) -> Iterator[Path]:
    """Yield the paths below a folder that are not hidden. Each folder is entered once."""

    def refuse(error: OSError) -> None:
        raise error

    entered = {*left_out}
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        is_new = os.path.realpath(place) not in entered
        entered.add(os.path.realpath(place))
        folders[:] = [n for n in folders if is_new and not n.startswith(".") and n not in left_out]
        yield from (Path(place, name) for name in names if is_new and not name.startswith("."))


def find_corpus(path: Paths | None, pattern: str, cache_dir: Path) -> list[Path]:
    """Return the files of a corpus, or with None those of Python's library, by `find_files`."""
    left_out = {str(cache_dir)}
    if path is None:
        path, left_out = sysconfig.get_path("stdlib"), left_out | _EXCLUDED_FOLDERS
        pattern = "*.py" if pattern == "*" else pattern
    return find_files(path, lambda name: fnmatch(f"/{name}", f"*/{pattern}"), left_out)


def format_of(file: Path, given: str | None = None) -> str:
    """Return the format of a file by its suffix: text, jsonl, json, parquet or csv.

    A format that is `given` is returned whatever the suffix. An unknown suffix is text.
    """
    stem = file.stem if file.suffix.lower() in _COMPRESSED else file.name
    return given or _FORMATS.get(Path(stem).suffix.lower(), "text")


def read_pieces(
    files: list[Path], val_fraction: float, format: str | None, text_key: str | None, newline: bool
) -> Iterator[Piece]:
    """Yield the text of a corpus in pieces, document by document, in the order of the files.

    Each record, and each piece of a text file, belongs to one set; those of validation are spread
    evenly. With `newline` a document ends with a newline. Raises the errors of `read_records`, and
    a DataError for a file that is not UTF-8 or a record without `text_key` (None: "text").
    """
    n_bytes = sum(file.stat().st_size for file in files)
    sizes = min(PIECE_CHARS, 1 + n_bytes // 64), min(_LINE_CHARS, 1 + n_bytes // 16)
    number = 0  # of the unit
    for file in files:
        kind = format_of(file, format)
        if kind == "text" and text_key is not None:
            raise DataError(f"{file}: text, but data.text_key={text_key}; try: data.format=jsonl")
        for text, is_last in _read_texts(file, kind, text_key or "text", sizes):
            is_val = _is_val(number, val_fraction)
            if kind == "text" or is_last:
                number += 1
            ends_part = is_last or is_val != _is_val(number, val_fraction)
            if newline and is_last and not text.endswith("\n"):
                text += "\n"
            yield Piece(text, is_val, ends_part, is_last)


def _read_texts(
    file: Path, kind: str, text_key: str, sizes: tuple[int, int]
) -> Iterator[tuple[str, bool]]:
    """Yield the documents of a file in pieces, and whether a piece is the last of its document."""
    if kind != "text":
        for record, place in read_records(file, kind):
            text = io.StringIO(_text_of(record, text_key, place), newline="")
            yield from _cut(text, PIECE_CHARS, _LINE_CHARS)
        return
    try:
        with file.open(encoding="utf-8", newline="") as text:
            yield from _cut(text, *sizes)
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 ({error.reason}); try: data.pattern='*.txt'") from None


def _cut(document: TextIO, n_chars: int, line_chars: int) -> Iterator[tuple[str, bool]]:
    """Yield pieces that end with a line, unless more than `line_chars` are left of it."""
    pieces = iter(lambda: document.read(n_chars) + document.readline(line_chars), "")
    for text, following in pairwise(chain(pieces, [""])):
        yield text, not following


def _is_val(number: int, fraction: float) -> bool:
    # Multiples of 2^64 / golden ratio are evenly distributed modulo 2^64.
    return number * GOLDEN % 2**64 < fraction * 2**64


def read_records(file: Path, kind: str) -> Iterator[tuple[Any, str]]:
    """Yield each record of a file, and its place for an error message: "<file>: record <number>".

    `kind` is jsonl, json, parquet or csv (`format_of`). A record is a dict, or in jsonl any value
    of JSON. Raises a DataError if the file is damaged, an OSError if it cannot be read, and a
    ModuleNotFoundError if it needs the package `datasets`, which is missing.
    """
    number = 0
    try:
        for number, record in enumerate(_read(file, kind), 1):
            yield record, f"{file}: record {number}"
    except Exception as error:  # the package datasets raises any class
        if isinstance(error, ModuleNotFoundError) or getattr(error, "errno", None):
            raise
        raise DataError(f"{file}: damaged after record {number}: {first_line(error)}") from error


def _read(file: Path, kind: str) -> Iterator[Any]:
    """Yield each record of a file."""
    suffix = file.suffix.lower()
    if kind == "csv" or (kind == "jsonl" and suffix not in _COMPRESSED[1:]):
        with gzip.open(file) if suffix == ".gz" else file.open("rb") as lines:
            if kind == "jsonl":
                yield from (json.loads(line) for line in lines if line.strip())
                return
            csv.field_size_limit(2**31 - 1)  # characters of a value
            text = io.TextIOWrapper(lines, "utf-8-sig", newline="")
            separator = "\t" if ".tsv" in file.name.lower() else ","
            for row in csv.DictReader(text, restval="", delimiter=separator, strict=True):
                if None in row:  # pandas would shift the values
                    raise ValueError("a row has more values than there are columns")
                yield row
        return
    kind = "json" if kind == "jsonl" else kind
    path = glob.escape(str(file.absolute()))
    load = import_module("datasets").load_dataset  # a package that only these files need
    yield from load(kind, data_files=path, split="train", streaming=True)


def _text_of(record: Any, text_key: str, place: str) -> str:
    if isinstance(record, dict) and isinstance(text := record.get(text_key), str):
        return text.encode(errors="replace").decode()  # half a surrogate pair is no character
    found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
    hint = "data.text_key=<key>, or data.format=text"
    raise DataError(f"{place}: no text under {text_key!r}, but {found:.200}; try: {hint}")
