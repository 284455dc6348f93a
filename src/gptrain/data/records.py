"""Readers of files of records: JSON lines, JSON arrays and Parquet.

A record is a JSON object, or a row of a table, whose text is under one key.

JSON may be plain or compressed by gzip or zstd. Memory holds at most one record, one line, or the
text column of one row group.
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

from gptrain.core.errors import DataError
from gptrain.core.small_files import open_regular
from gptrain.data.json_array import holds_array, read_array

FORMATS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".jsonl.zst": "jsonl", ".parquet": "parquet"}
# The content decides about the format of a file with one of these suffixes: an array of records,
# one record per line, or text.
JSON_SUFFIXES = (".json", ".json.gz", ".json.zst")
_BATCH_ROWS = 1024  # rows of a Parquet file that are converted at once
_LIBRARIES = ("gzip", "zlib", "zstandard", "zstd", "pyarrow")
TextOrError = bytes | DataError  # text of a record, or the reason why the record has no text


def format_of(path: Path) -> str:
    """Return the format of a file: "text", "jsonl", "json" or "parquet".

    The suffix of the name decides; any unknown suffix is "text". For .json, .json.gz and .json.zst
    the beginning of the content decides, too. "json" is an array that begins with an object or a
    string, or an object whose key "data" holds an array that begins with an object. Any other plain
    .json file is "text": package.json, for example, is one document. Any other compressed one is
    "jsonl", also a damaged one.

    Args:
        path: Path of an existing file.

    Raises:
        OSError: If the beginning of a .json file cannot be read.
        ModuleNotFoundError: If a .json.zst file needs the package `zstandard` and it is missing.
    """
    name = path.name.lower()
    if name.endswith(JSON_SUFFIXES):
        with (
            suppress(DataError),
            open_regular(path) as file,
            _as_data_errors(path),
            _decompressed(path, file) as stream,
        ):
            if holds_array(path, stream):
                return "json"
        return "text" if name.endswith(".json") else "jsonl"
    return next((FORMATS[suffix] for suffix in FORMATS if name.endswith(suffix)), "text")


def read_records(path: Path, format: str, text_key: str) -> Iterator[tuple[TextOrError, int]]:
    """Yield for each record its text in UTF-8, and the number of bytes of the file read for it.

    For a record without text a DataError is yielded in place of the text, not raised. The bytes are
    those of the compressed file, if it is compressed, and the mean per row for Parquet.

    Args:
        path: File to read.
        format: Format of the file: jsonl, json or parquet.
        text_key: Key or column of the text.

    Raises:
        DataError: If the file is damaged, has no record, or is a Parquet file without the column
            `text_key`.
        OSError: If the file cannot be opened.
        ModuleNotFoundError: If an optional package is missing. The message has the pip command.
    """
    is_empty = True
    readers = {"jsonl": read_json_lines, "json": read_json_array, "parquet": read_parquet}
    for number, record, n_read in readers[format](path, text_key):
        is_empty = False
        yield _text_of(record, text_key, f"{path}: record {number}"), n_read
    if is_empty:
        raise DataError(f"{path}: no record")


def read_json_lines(path: Path, text_key: str) -> Iterator[tuple[int, object, int]]:
    """Yield for each line its number from 1, its JSON value, and the number of bytes read for it.

    Empty lines are left out. For a line that is not JSON a DataError is yielded in place of the
    value, not raised. The bytes are those of the compressed file, if it is compressed.

    Args:
        path: File of JSON lines, plain or compressed.
        text_key: Name without an effect. All readers of `read_records` have this argument.

    Raises:
        DataError: If the compressed file is damaged, or the path is no regular file.
        OSError: If the file cannot be opened.
        ModuleNotFoundError: If a .zst file needs the package `zstandard`, which is missing.
    """
    before = 0
    with open_regular(path) as file, _as_data_errors(path), _decompressed(path, file) as lines:
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
    """Yield for each element of a JSON array its number from 1, its value, and the bytes read.

    The bytes are those of the compressed file, if it is compressed.

    Args:
        path: JSON file with an array, plain or compressed.
        text_key: Name without an effect. All readers of `read_records` have this argument.

    Raises:
        DataError: If the file is damaged or has no array, or the path is no regular file.
        OSError: If the file cannot be opened.
        ModuleNotFoundError: If a .zst file needs the package `zstandard`, which is missing.
    """
    before = 0
    with open_regular(path) as file, _as_data_errors(path), _decompressed(path, file) as stream:
        for number, record in enumerate(read_array(path, stream), 1):
            yield number, record, file.tell() - before
            before = file.tell()


def read_parquet(path: Path, text_key: str) -> Iterator[tuple[int, object, int]]:
    """Yield for each row its number from 1, a dict {text_key: text}, and the mean bytes per row.

    Args:
        path: Parquet file.
        text_key: Name of the text column.

    Raises:
        DataError: If the file is damaged or has no such column, or the path is no regular file.
        OSError: If the file cannot be opened.
        ModuleNotFoundError: If the package `pyarrow` is missing. The message has the pip command.
    """
    parquet = _import_optional("pyarrow.parquet", "parquet")
    with open_regular(path) as raw, _as_data_errors(path):
        size_bytes = raw.seek(0, io.SEEK_END)
        file = parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        if text_key not in names:
            message = f"{path}: no column {text_key!r}; columns of the file: {', '.join(names)}"
            texts = [f.name for f in file.schema_arrow if str(f.type) in ("string", "large_string")]
            raise DataError(message + (f"; try: data.text_key={texts[0]}" if texts else ""))
        row_bytes = size_bytes // max(1, file.metadata.num_rows)
        number = 0
        for batch in file.iter_batches(_BATCH_ROWS, columns=[text_key], use_threads=False):
            for value in batch.column(0).to_pylist():
                number += 1
                yield number, {text_key: value}, row_bytes


def _text_of(record: object, text_key: str, place: str) -> TextOrError:
    """Return the text of a record in UTF-8, or a DataError (not raised) if the record has no text.

    Args:
        record: Value of the record, or a DataError, which is returned unchanged.
        text_key: Key of the text.
        place: Description of the file and the record for the message.
    """
    if isinstance(record, DataError):
        return record
    if not isinstance(record, dict):
        hint = "data.format=text, to train on the file as plain text"
        if isinstance(record, list):
            hint = f"data.format=json for a file that is one array, or {hint}"
        return DataError(f"{place}: not an object but {type(record).__name__}; try: {hint}")
    if text_key not in record:
        message = f"no key {text_key!r}; keys of the record: {', '.join(record)}"
        keys = [key for key, value in record.items() if isinstance(value, str)]
        hint = f"; try: data.text_key={keys[0]}" if keys else ""
        return DataError(f"{place}: {message}{hint}")
    text = record[text_key]
    if not isinstance(text, str):
        return DataError(f"{place}: {text_key!r} is not a text but {type(text).__name__}")
    # JSON can contain half of a surrogate pair, which has no UTF-8. It becomes a question mark.
    return text.encode(errors="replace")


@contextmanager
def _decompressed(path: Path, file: BinaryIO) -> Generator[BinaryIO, None, None]:
    """Yield a stream of the decompressed bytes of an open file.

    Args:
        path: Path whose suffix decides: .gz for gzip, .zst for zstd, any other for no compression.
        file: Opened file, which is not closed at the end of the block.

    Raises:
        ModuleNotFoundError: If the file needs the package `zstandard` and the package is missing.
    """
    if path.suffix.lower() == ".gz":
        with gzip.open(file) as stream:
            yield cast(BinaryIO, stream)
    elif path.suffix.lower() == ".zst":
        zstandard = _import_optional("zstandard", "zstd")
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        with io.BufferedReader(reader) as stream:
            yield stream
    else:
        yield file


@contextmanager
def _as_data_errors(path: Path) -> Generator[None, None, None]:
    """Turn an error of a decoding library inside the block into a DataError that names the file.

    Args:
        path: File that the block reads.

    Raises:
        DataError: If gzip, zlib, zstandard or pyarrow raises an error, or if gzip data end too
            early. Other errors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        library = type(error).__module__.split(".")[0]
        # gzip raises an EOFError for a truncated file.
        if library not in _LIBRARIES and not isinstance(error, EOFError):
            raise
        raise DataError(f"{path}: damaged ({str(error).splitlines()[0]})") from None


def _import_optional(name: str, extra: str) -> ModuleType:
    """Import and return a module of an optional package.

    Args:
        name: Name of the module.
        extra: Extra of gptrain that installs the package.

    Raises:
        ModuleNotFoundError: If the package is missing. The message has the pip command.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.split(".")[0]
        message = f"this file needs the package {package}: pip install 'gptrain[{extra}]'"
        raise ModuleNotFoundError(message) from None
