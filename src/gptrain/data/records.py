"""Files of records, of which one key is text: JSON lines, a JSON array, and Parquet.

JSON may be plain or compressed by gzip or zstd. At most one record, one line or the column of one
row group is in memory.
"""

import gzip
import io
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, cast

from gptrain.core.small_files import DataError, open_regular
from gptrain.data.json_array import holds_array, read_array

FORMATS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "parquet"}
# A file with such a suffix may be an array of records, one record a line, or no records at all.
JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
_ROWS = 1024  # of a Parquet file, at once
_LIBRARIES = ("gzip", "zlib", "zstandard", "zstd", "pyarrow")
Text = bytes | DataError  # of a record; what is wrong with it


def format_of(path: Path) -> str:
    """Return the format of a file: by the suffix of its name, of a .json file by its content.

    A plain .json file that is no array of records is text: package.json is a document of its own.
    """
    name = path.name.lower()
    if name.endswith(JSON_SUFFIXES):
        with (
            suppress(DataError),
            open_regular(path) as file,
            _damage_named(path),
            _decompressed(path, file) as stream,
        ):
            if holds_array(path, stream):
                return "json"
        return "text" if name.endswith(".json") else "jsonl"
    return next((FORMATS[suffix] for suffix in FORMATS if name.endswith(suffix)), "text")


def read_records(path: Path, format: str, text_key: str) -> Iterator[tuple[Text, int]]:
    """The text of each record in UTF-8, and how many bytes of the file were read for it.

    Raises: DataError for a damaged file or one without a record; ModuleNotFoundError with what to
        install.
    """
    is_empty = True
    read = {"jsonl": read_json_lines, "json": read_json_array, "parquet": read_parquet}
    for number, record, n_read in read[format](path, text_key):
        is_empty = False
        yield _text_of(record, text_key, f"{path}: record {number}"), n_read
    if is_empty:
        raise DataError(f"{path}: no record")


def read_json_lines(path: Path, text_key: str) -> Iterator[tuple[int, object, int]]:
    """Line number, the value or what is wrong with it, and bytes read; empty lines are left out."""
    before = 0
    with open_regular(path) as file, _damage_named(path), _decompressed(path, file) as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = DataError(f"{path}: record {number}: broken JSON ({error})")
            yield number, record, file.tell() - before
            before = file.tell()


def read_json_array(path: Path, text_key: str) -> Iterator[tuple[int, object, int]]:
    """Yield the number of each element, the element, and the bytes of the file read for it."""
    before = 0
    with open_regular(path) as file, _damage_named(path), _decompressed(path, file) as stream:
        for number, record in enumerate(read_array(path, stream), 1):
            yield number, record, file.tell() - before
            before = file.tell()


def read_parquet(path: Path, text_key: str) -> Iterator[tuple[int, object, int]]:
    """Row number, a record of the one column, and bytes read."""
    parquet = _library("pyarrow.parquet", "parquet")
    with open_regular(path) as raw, _damage_named(path):
        size_bytes, file = raw.seek(0, io.SEEK_END), parquet.ParquetFile(raw)
        if text_key not in (names := file.schema_arrow.names):
            raise DataError(f"{path}: no column {text_key!r}; there are: {', '.join(names)}")
        n_read, number = size_bytes // max(1, file.metadata.num_rows), 0
        for batch in file.iter_batches(_ROWS, columns=[text_key], use_threads=False):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, {text_key: value}, n_read


def _text_of(record: object, text_key: str, place: str) -> Text:
    """Return the text of a record in UTF-8, or what is wrong with the record."""
    if isinstance(record, DataError):
        return record
    if not isinstance(record, dict):
        hint = "data.format=text, to train on the file as it stands"
        if isinstance(record, list):
            hint = f"data.format=json for a file that is one array, or {hint}"
        return DataError(f"{place}: no object but {type(record).__name__}; try: {hint}")
    if text_key not in record:
        message = f"no key {text_key!r}; there are: {', '.join(record)}"
        keys = [key for key, value in record.items() if isinstance(value, str)]
        hint = f"; try: data.text_key={keys[0]}" if keys else ""
        return DataError(f"{place}: {message}{hint}")
    text = record[text_key]
    if not isinstance(text, str):
        return DataError(f"{place}: {text_key!r} is no text but {type(text).__name__}")
    return text.encode(errors="replace")  # half of a surrogate pair, which JSON can say: ?


@contextmanager
def _decompressed(path: Path, file: BinaryIO) -> Generator[BinaryIO, None, None]:
    if path.suffix == ".gz":
        with gzip.open(file) as stream:
            yield cast(BinaryIO, stream)
    elif path.suffix == ".zst":
        zstandard = _library("zstandard", "zstd")
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        with io.BufferedReader(reader) as stream:
            yield stream
    else:
        yield file


@contextmanager
def _damage_named(path: Path) -> Generator[None, None, None]:
    """Raises a DataError for what the libraries raise of a damaged file."""
    try:
        yield
    except Exception as error:
        library = type(error).__module__.split(".")[0]
        if library not in _LIBRARIES and not isinstance(error, EOFError):  # gzip's
            raise
        raise DataError(f"{path}: damaged ({str(error).splitlines()[0]})") from None


def _library(name: str, extra: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"such a file needs the package {name.split('.')[0]}: pip install 'gptrain[{extra}]'"
        ) from None
