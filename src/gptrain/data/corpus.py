"""A corpus: which files it is made of, how it is split, and its text, piece by piece.

A document is a text file, or a record of a file of records (gptrain.data.records). Documents
follow each other in the order of their files' names.
"""

import codecs
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from gptrain.core.small_files import DataError, open_regular
from gptrain.data.folders import FoundFile, SkippedPaths, walk_files
from gptrain.data.order import GOLDEN
from gptrain.data.records import format_of, read_records

BLOCK_BYTES = 2**16
# Other packages, and tests: some of their files are deliberately not UTF-8.
_NO_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_SECTION_BYTES = 2**14  # about a source file: many make a fair sample, few words lose context
_MAX_SECTIONS = 2**16
_LINE_BYTES = 2**12  # longer lines may be cut between two parts


@dataclass(frozen=True, order=True)
class Source:
    """One file of a corpus, by its name within it (posix, relative to the folder given)."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
    format: str  # text, jsonl, json or parquet
    is_declared: bool  # the format was asked for, or is a record's suffix

    @classmethod
    def of(cls, file: FoundFile, format: str | None) -> "Source":
        """Look up size, time and format; only of a .json file the head is read for it.

        A link is known by its own suffix. A link without a suffix is known by what it leads to.
        """
        path = file.path if file.path.suffix else Path(file.real_path)
        status, known = path.stat(), format or format_of(path)
        is_declared = bool(format) or known != "text"
        return cls(file.name, path, status.st_size, status.st_mtime_ns, known, is_declared)


@dataclass(frozen=True)
class Part:
    """The bytes of a text file from `start` to `stop`, in training or in validation."""

    source: Source
    start: int
    stop: int
    is_val: bool


class Piece(NamedTuple):
    """Some text of one document: whole characters, and whole lines unless one is long."""

    text: bytes
    is_val: bool
    is_last: bool  # the next piece goes on elsewhere: with another document, or part of this one
    is_end: bool  # the document ends with it
    n_read: int  # bytes of the source that were read for it


class Content(NamedTuple):
    """Result of reading a source once from its first to its last byte.

    Attributes:
        sha256: Hash of the bytes. None for a text file that is not UTF-8.
        bad_byte: Position of the first byte that is not UTF-8 in a text file, or None.
    """

    sha256: str | None
    bad_byte: int | None


def default_corpus() -> list[Source]:
    """Return the Python standard library's own source without its tests: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    files = walk_files(root, SkippedPaths(), _NO_SOURCE)
    return [Source.of(one, "text") for one in files if _matches(one.name, "*.py")]


def find_sources(
    path: str | os.PathLike | Sequence[str | os.PathLike] | None,
    pattern: str = "*",
    format: str | None = None,
    cache_dir: Path | None = None,
) -> list[Source]:
    """Return the sources of a file, a folder with all below it, a glob, or a list, sorted by name.

    Links are followed. A file to which several paths lead is read once: a second copy of it could
    be part of the validation set while the first one is trained on.

    Args:
        path: None for `default_corpus`.
        pattern: Pattern that names of files within folders must match, as `*.py`. A pattern with a
            slash is matched with the whole name. Hidden files and folders are left out.
        format: Format of all files. None takes the format that the name of each says.
        cache_dir: Folder of which nothing is part of a corpus.

    Raises:
        FileNotFoundError: If a name, or what a link leads to, does not exist.
        DataError: If nothing matches.
    """
    if path is None:
        found = [source for source in default_corpus() if _matches(source.name, pattern)]
    else:
        skipped = SkippedPaths()
        files = list(_find_files(path, pattern, skipped))
        if cache_dir is not None:
            below = f"{cache_dir.resolve()}{os.sep}"
            files = [one for one in files if not one.real_path.startswith(below)]
        # A file is known by its own path where it has one, and else by the first link to it.
        files.sort(key=lambda one: (str(one.path) != one.real_path, one.name))
        first: dict[str, FoundFile] = {}
        for one in files:
            if first.setdefault(one.real_path, one) is not one and str(one.path) != one.real_path:
                skipped.repeated.append(str(one.path))
        skipped.warn()
        found = [Source.of(one, format) for one in first.values()]
    if not found:
        raise DataError(f"{path}: no file matches {pattern!r}")
    return sorted(found)


def _find_files(
    path: str | os.PathLike | Sequence[str | os.PathLike], pattern: str, skipped: SkippedPaths
) -> Iterator[FoundFile]:
    """Yield the files that a path, a folder, a glob or a list of them names."""
    for given in [path] if isinstance(path, (str, os.PathLike)) else path:
        given = os.path.expanduser(given)
        names = [] if os.path.lexists(given) else sorted(glob.glob(given, recursive=True))
        for name in names or [given]:
            if names and not os.path.exists(name):
                skipped.dangling.append(f"{name} -> {os.readlink(name)}")
                continue
            real_path = Path(name).resolve(strict=True)
            if real_path.is_dir():
                files = walk_files(real_path, skipped, enter_once="/" not in pattern)
                yield from (one for one in files if _matches(one.name, pattern))
            elif real_path.is_file():  # and no pipe, which would block for ever
                yield FoundFile(real_path.name, Path(os.path.abspath(name)), str(real_path))


def look_through(source: Source, text_key: str) -> Content:
    """Hash the bytes of a source, and check that a text file is UTF-8.

    Raises:
        DataError: For a text file whose content is records.
    """
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    n_read = 0  # bytes
    with open_regular(source.path) as file:
        # A file of /proc has no size, and no end.
        while block := file.read(min(2**20, source.size_bytes - n_read)):
            is_first, n_read = n_read == 0, n_read + len(block)
            digest.update(block)
            if source.format != "text":
                continue
            if is_first and not source.is_declared:
                _check_no_records(source.path, block, text_key)
            try:
                decoder.decode(block, final=n_read == source.size_bytes)
            except UnicodeDecodeError as error:
                # The decoder puts the bytes of an unfinished character in front of the next block.
                return Content(None, n_read - len(error.object) + error.start)
    return Content(digest.hexdigest(), None)


def split(sources: Sequence[Source], val_fraction: float) -> list[Part]:
    """Train and validation parts of text files: the same bytes whatever the tokenizer.

    Sections of 16 KiB (1/65536 of the corpus, if more) go to validation in the order of the hash
    of their file's name and place, until its fraction of the bytes is full; the one that does not
    fit gives its last lines. So files below 16 KiB stay whole, no large one makes up the validation
    set alone, and a file that is added moves few others. Sections begin and end with lines.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}: must be between 0 and 1")
    total_bytes = sum(source.size_bytes for source in sources)
    section_bytes = max(_SECTION_BYTES, total_bytes // _MAX_SECTIONS)
    sections = [
        (hashlib.sha256(os.fsencode(source.name) + b" %d" % start).digest(), source, start)
        for source in sources
        for start in range(0, source.size_bytes, section_bytes)
    ]
    chosen: dict[Source, list[tuple[int, int]]] = {source: [] for source in sources}
    wanted_bytes = int(val_fraction * total_bytes)
    for _, source, start in sorted(sections):
        stop = min(start + section_bytes, source.size_bytes)
        start = max(start, stop - wanted_bytes)
        chosen[source].append((_cut_before(source, start), _cut_before(source, stop)))
        wanted_bytes -= stop - start
        if wanted_bytes <= 0:
            break
    parts = []
    for source, ranges in chosen.items():
        done = 0
        for start, stop in sorted(ranges):
            parts += [Part(source, done, start, False), Part(source, start, stop, True)]
            done = stop
        parts.append(Part(source, done, source.size_bytes, False))
    return [part for part in parts if part.start < part.stop]


def read_pieces(
    sources: Sequence[Source],
    val_fraction: float,
    text_key: str = "text",
    newline: bool = True,
    bad_records: list[str] | None = None,
) -> Iterator[Piece]:
    """The text of a corpus, document by document.

    Of records a fraction goes to validation by their number, evenly spread.

    Args:
        newline: a document that does not end with a newline gets one.
        bad_records: gets what is wrong with each record that has no text; None: that is an error.
    Raises: DataError.
    """
    texts = [source for source in sources if source.format == "text"]
    by_source: dict[Source, list[Part]] = {source: [] for source in texts}
    for part in split(texts, val_fraction):
        by_source[part.source].append(part)
    number = 0  # of the record, in the whole corpus
    for source in sources:
        for part in by_source.get(source, ()):
            yield from _read_part(part, newline)
        if source.format == "text":
            continue
        for text, n_read in read_records(source.path, source.format, text_key):
            # Multiples of 2^64 / the golden ratio are spread evenly modulo 2^64.
            is_val = number * GOLDEN % 2**64 < val_fraction * 2**64
            number += 1
            if isinstance(text, DataError):
                if bad_records is None:
                    raise text
                bad_records.append(str(text))
            elif text:
                yield from _cut_record(_with_newline(text) if newline else text, is_val, n_read)


def cut_at(block: bytes) -> int:
    """Where to cut a block: after its last newline, failing that before its last character."""
    if newline := block.rfind(b"\n") + 1:
        return newline
    places = range(max(0, len(block) - 4), len(block))  # a character has 4 bytes at most
    return max((i for i in places if block[i] & 0xC0 != 0x80), default=0)  # no continuation byte


def _read_part(part: Part, newline: bool) -> Iterator[Piece]:
    """Yield a part of a text file in blocks of whole characters. A token ends with its block.

    Raises:
        DataError: If the file is not UTF-8. It was UTF-8 when it was hashed.
    """
    left, rest = part.stop - part.start, b""
    with open_regular(part.source.path) as file:
        file.seek(part.start)
        while left and (read := file.read(min(BLOCK_BYTES, left))):
            left -= len(read)
            rest += read
            if left and (cut := cut_at(rest)):
                yield Piece(_checked(rest[:cut], part), part.is_val, False, False, cut)
                rest = rest[cut:]
    is_end = part.stop == part.source.size_bytes
    text = _checked(rest, part)
    text = _with_newline(text) if newline and is_end else text
    yield Piece(text, part.is_val, True, is_end, len(rest))


def _checked(text: bytes, part: Part) -> bytes:
    """Return the text of a part if it is UTF-8. A file may change after it was hashed."""
    try:
        text.decode()
    except UnicodeDecodeError:
        raise DataError(f"{part.source.path}: changed since it was hashed; start again") from None
    return text


def _cut_record(text: bytes, is_val: bool, n_read: int) -> Iterator[Piece]:
    """A record as it is; one that is no batch by itself in blocks."""
    while len(text) > 16 * BLOCK_BYTES:
        cut = cut_at(text[:BLOCK_BYTES])
        yield Piece(text[:cut], is_val, False, False, 0)
        text = text[cut:]
    yield Piece(text, is_val, True, True, n_read)


def _check_no_records(path: Path, head: bytes, text_key: str) -> None:
    """Raise a DataError for a text file that begins as JSON lines or as an array of records."""
    head = head.removeprefix(codecs.BOM_UTF8)
    if _is_json_lines(head, text_key):
        message, format = "JSON lines, which would be trained on as they stand", "jsonl"
    elif _is_array(head):
        message, format = "a JSON array of records, which would be trained on as it stands", "json"
    else:
        return
    hint = f"data.format={format} data.text_key=<key>, or data.format=text"
    raise DataError(f"{path}: {message}; try: {hint}")


def _is_json_lines(head: bytes, text_key: str) -> bool:
    """Return whether a file that begins so is a JSON object a line; one alone needs the key."""
    lines = [line for line in head.splitlines()[:8] if line.strip()][:2]
    try:
        records = [json.loads(line) for line in lines if line.lstrip().startswith(b"{")]
    except (ValueError, RecursionError):
        return False
    return len(records) == 2 or (len(lines) == len(records) == 1 and text_key in records[0])


def _is_array(head: bytes) -> bool:
    """Return whether a file that begins so is a JSON array whose first element is an object."""
    begin = re.match(rb"\s*\[\s*(?=\{)", head)
    try:
        text = head[begin.end() :].decode(errors="ignore") if begin else ""
        return bool(begin) and bool(json.JSONDecoder().raw_decode(text)[0])
    except (ValueError, RecursionError):
        return False


def _cut_before(source: Source, position: int) -> int:
    """Where the line begins in which `position` lies, in a long line the character before."""
    if position in (0, source.size_bytes):
        return position
    start = max(0, position - _LINE_BYTES)
    with open_regular(source.path) as file:
        file.seek(start)
        return start + cut_at(file.read(position - start))


def _with_newline(text: bytes) -> bytes:
    return text if text.endswith(b"\n") else text + b"\n"


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name if "/" in pattern else name.rpartition("/")[2], pattern)
