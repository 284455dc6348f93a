"""A text corpus: its files, their split into training and validation, and their text in pieces.

A document is a text file, or one record of a file of records: of JSON lines, a JSON array or a
Parquet file. Documents follow each other in the order of the names of their files.
"""

import codecs
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from gptrain.core.errors import DataError
from gptrain.core.small_files import open_regular
from gptrain.data.folders import FoundFile, SkippedPaths, walk_files
from gptrain.data.order import GOLDEN
from gptrain.data.records import format_of, read_records

BLOCK_BYTES = 2**16
# Folders of the standard library with other packages and with tests. Some test files are
# deliberately not UTF-8.
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
# Smallest section of the split, about the size of a source file: a validation set of many small
# sections is representative, and few words lose their context at a cut.
_SECTION_BYTES = 2**14
_MAX_SECTIONS = 2**16
_LINE_BYTES = 2**12  # a longer line may be cut between two sections


@dataclass(frozen=True, order=True)
class Source:
    """One file of a corpus. Sources are compared and sorted by `name` first.

    Attributes:
        name: Path relative to the folder of the corpus, with slashes.
        path: Path from which the file is read.
        size_bytes: Size of the file.
        mtime_ns: Time of the last modification.
        format: Format of the file: text, jsonl, json or parquet.
    """

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int
    format: str

    @classmethod
    def from_file(cls, file: FoundFile, format: str | None) -> "Source":
        """Build the source for a file: look up its size, modification time and format.

        The suffix of the file decides about its format. For a link without a suffix, the suffix of
        the link's target decides. The beginning of a .json file is read to find its format. No
        other file is read.

        Args:
            file: File of a corpus.
            format: Format of the file: text, jsonl, json or parquet. None finds the format by the
                suffix and the beginning of the file.

        Raises:
            OSError: If the file is missing, or the beginning of a .json file cannot be read.
            ModuleNotFoundError: If a .json.zst file needs the missing package `zstandard`.
        """
        path = file.path if file.path.suffix else Path(file.real_path)
        status = path.stat()
        file_format = format or format_of(path)
        return cls(file.name, path, status.st_size, status.st_mtime_ns, file_format)


@dataclass(frozen=True)
class Part:
    """A range of bytes of a text file that belongs to the training or to the validation set.

    Attributes:
        source: Text file.
        start: Byte offset of the first byte of the part.
        stop: Byte offset after the last byte of the part.
        is_val: Whether the part belongs to the validation set.
    """

    source: Source
    start: int
    stop: int
    is_val: bool


class Piece(NamedTuple):
    """Some consecutive text of one document, which is tokenized separately.

    A piece ends with a complete line or, if the line is longer than a block of 64 KiB, with a
    complete character. At the end of a document the last line may lack its newline.

    Attributes:
        text: Text in UTF-8.
        is_val: Whether the text belongs to the validation set.
        ends_part: Whether a part of a text file, or a record, ends with this piece. In the token
            files this position counts as the end of a document.
        ends_document: Whether the document ends with this piece.
        n_read_bytes: Bytes of the source that were read for this piece. If a record has several
            pieces, the last one has the bytes of the record, and the others have 0.
    """

    text: bytes
    is_val: bool
    ends_part: bool
    ends_document: bool
    n_read_bytes: int


class SourceScan(NamedTuple):
    """Result of reading a source once, to hash it and to check its encoding.

    Attributes:
        sha256: Hash of the bytes. None for a text file that is not UTF-8.
        bad_byte: Position of the first byte of a text file that is not UTF-8. None if there is no
            such byte, or if the file is not a text file.
    """

    sha256: str | None
    bad_byte: int | None


def default_corpus() -> list[Source]:
    """Return the .py files of Python's standard library without its tests, about 12 MB of text."""
    root = Path(sysconfig.get_path("stdlib"))
    files = walk_files(root, SkippedPaths(), _EXCLUDED_FOLDERS)
    return [Source.from_file(file, "text") for file in files if _matches(file.name, "*.py")]


def find_sources(
    path: str | os.PathLike | Sequence[str | os.PathLike] | None,
    pattern: str = "*",
    format: str | None = None,
    cache_dir: Path | None = None,
) -> list[Source]:
    """Return the files of a corpus, sorted by name.

    Links are followed. A file to which several paths lead is returned once. Otherwise one copy
    could be part of the validation set while another copy is trained on. Warns about paths that are
    skipped.

    Args:
        path: File, folder, glob pattern or a list of these. None takes `default_corpus`, for which
            `format` and `cache_dir` have no effect.
        pattern: Pattern that the names of files within folders must match, for example `*.py`. A
            pattern with a slash is matched with the path below the folder. Hidden files and folders
            are left out.
        format: Format of all files: text, jsonl, json or parquet. None takes the format of each
            file from its suffix, and from its content for .json.
        cache_dir: Folder of the tokenized data, whose files are left out.

    Raises:
        FileNotFoundError: If a given path does not exist or is a link without a target, or if a
            glob pattern matches nothing. Links without a target in a folder are skipped.
        OSError: If a given folder, or the beginning of a .json file, cannot be read.
        ModuleNotFoundError: If a .json.zst file needs the missing package `zstandard`.
        DataError: If no file is left.
    """
    if path is None:
        sources = [source for source in default_corpus() if _matches(source.name, pattern)]
    else:
        skipped = SkippedPaths()
        files = list(_find_files(path, pattern, skipped))
        if cache_dir is not None:
            prefix = f"{cache_dir.resolve()}{os.sep}"
            files = [file for file in files if not file.real_path.startswith(prefix)]
        # A file that was reached without a link keeps the name of this path. Any other file has
        # the name of the first link to it.
        files.sort(key=lambda file: (str(file.path) != file.real_path, file.name))
        unique: dict[str, FoundFile] = {}
        for file in files:
            is_repeated = unique.setdefault(file.real_path, file) is not file
            if is_repeated and str(file.path) != file.real_path:
                skipped.repeated.append(str(file.path))
        skipped.warn()
        sources = [Source.from_file(file, format) for file in unique.values()]
    if not sources:
        raise DataError(f"{path}: no file matches {pattern!r}")
    return sorted(sources)


def _find_files(
    path: str | os.PathLike | Sequence[str | os.PathLike], pattern: str, skipped: SkippedPaths
) -> Iterator[FoundFile]:
    """Yield the files at a path, at the matches of a glob pattern, or at each entry of a list.

    For a folder, the files below it at any depth are yielded, if they match `pattern`. The entries
    of a list come in their order, the matches of a glob pattern in sorted order. Pipes and devices
    are left out.

    Args:
        path: File, folder, glob pattern or a list of these.
        pattern: Pattern that the names of files within folders must match, or their paths below the
            folder if the pattern has a slash.
        skipped: Object to which links without a target and other skipped paths are added.

    Raises:
        FileNotFoundError: If a path or the target of a link in `path` does not exist, or if a glob
            pattern matches nothing.
        OSError: If a folder in `path` cannot be read.
    """
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
                yield from (file for file in files if _matches(file.name, pattern))
            elif real_path.is_file():  # reading a named pipe could block for ever
                yield FoundFile(real_path.name, Path(os.path.abspath(name)), str(real_path))


def scan_source(source: Source) -> SourceScan:
    """Hash the bytes of a source, and check that a text file is UTF-8.

    Reading ends at the first byte of a text file that is not UTF-8.

    Args:
        source: File to read.

    Raises:
        DataError: If the path is no regular file by now.
        OSError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_read = 0  # bytes
    with open_regular(source.path) as file:
        # Read no more than the size: files of /proc have the size 0 and may have no end.
        while block := file.read(min(2**20, source.size_bytes - n_read)):
            n_read += len(block)
            digest.update(block)
            if source.format != "text":
                continue
            try:
                decoder.decode(block, final=n_read == source.size_bytes)
            except UnicodeDecodeError as error:
                # The decoder puts the bytes of an unfinished character in front of the next block.
                return SourceScan(None, n_read - len(error.object) + error.start)
    return SourceScan(digest.hexdigest(), None)


def split(sources: Sequence[Source], val_fraction: float) -> list[Part]:
    """Split text files into training and validation parts, in the same way for every tokenizer.

    Each file is divided into sections of 16 KiB, or of 1/65536 of the corpus if that is more. The
    sections are sorted by a hash of the file's name and the section's position. Sections go to
    validation in this order until the validation set has `val_fraction` of the bytes; of the last
    of them, only the last lines go there. Therefore a file below 16 KiB is seldom cut, a single
    large file cannot make up the validation set alone, and an added file changes the split of few
    others. Sections begin and end at line ends, except in lines longer than 4 KiB and in the first
    line of a file: these may be cut between any two characters.

    Args:
        sources: Text files.
        val_fraction: Fraction of the bytes for validation, between 0 and 1.

    Returns:
        The parts of all files, without empty parts. The parts of a file are in order.

    Raises:
        ValueError: If `val_fraction` is not between 0 and 1.
        OSError: If a file cannot be read. It is read where it is cut, to find a line end.
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
) -> Iterator[Piece]:
    """Yield the text of a corpus in pieces, document by document, each marked by its split.

    A text file is one document. It is divided into sections of 16 KiB, or more in a corpus above
    1 GiB, each of which belongs to training or to validation, so both may have parts of one file. A
    record is one document and belongs to one of them as a whole. Its number in the corpus decides,
    so that the validation records are evenly spread. Empty records are left out.

    Args:
        sources: Files of the corpus.
        val_fraction: Fraction of the bytes of text files, and of the number of records, for
            validation.
        text_key: Key of the text in a record.
        newline: Whether to append a newline to each document that does not end with one.

    Raises:
        DataError: If a file of records is damaged or has no record, if a text file is no longer
            UTF-8, or if a record has no text.
        OSError: If a file cannot be read.
        ValueError: If `val_fraction` is not between 0 and 1.
        ModuleNotFoundError: If a format needs an optional package that is missing.
    """
    texts = [source for source in sources if source.format == "text"]
    by_source: dict[Source, list[Part]] = {source: [] for source in texts}
    for part in split(texts, val_fraction):
        by_source[part.source].append(part)
    number = 0  # number of the record in the corpus
    for source in sources:
        for part in by_source.get(source, ()):
            yield from _read_part(part, newline)
        if source.format == "text":
            continue
        for text, n_read in read_records(source.path, source.format, text_key):
            # Multiples of 2^64 / golden ratio are evenly distributed modulo 2^64.
            is_val = number * GOLDEN % 2**64 < val_fraction * 2**64
            number += 1
            if isinstance(text, DataError):
                raise text
            if text:
                yield from _cut_record(_with_newline(text) if newline else text, is_val, n_read)


def cut_at(block: bytes) -> int:
    """Return the position at which a block of UTF-8 can be cut without cutting a character.

    The position is after the last newline. In a block without a newline it is before the last
    character, which may be incomplete. In an empty block it is 0.

    Args:
        block: Bytes that begin with a complete character.
    """
    if newline := block.rfind(b"\n") + 1:
        return newline
    positions = range(max(0, len(block) - 4), len(block))  # a character has at most 4 bytes
    # A byte 10xxxxxx continues a character. Any other byte begins a character.
    return max((i for i in positions if block[i] & 0xC0 != 0x80), default=0)


def _read_part(part: Part, newline: bool) -> Iterator[Piece]:
    """Yield the text of a part in pieces that end with a line or, in a long line, with a character.

    A file that has become shorter gives less text, without an error.

    Args:
        part: Part of a text file.
        newline: Whether to append a newline to the end of a file that does not end with one.

    Raises:
        DataError: If the text is not UTF-8: the file has changed since it was hashed.
        OSError: If the file cannot be read.
    """
    n_left = part.stop - part.start
    rest = b""
    with open_regular(part.source.path) as file:
        file.seek(part.start)
        while n_left and (block := file.read(min(BLOCK_BYTES, n_left))):
            n_left -= len(block)
            rest += block
            if n_left and (cut := cut_at(rest)):
                yield Piece(_check_utf8(rest[:cut], part), part.is_val, False, False, cut)
                rest = rest[cut:]
    ends_document = part.stop == part.source.size_bytes
    text = _check_utf8(rest, part)
    text = _with_newline(text) if newline and ends_document else text
    yield Piece(text, part.is_val, True, ends_document, len(rest))


def _check_utf8(text: bytes, part: Part) -> bytes:
    """Check that a text is UTF-8, and return it unchanged.

    An earlier pass has hashed the file and checked that it is UTF-8. Text that is not UTF-8 now
    shows that the file was changed after that pass.

    Args:
        text: Text of a part, or of a piece of it.
        part: Part of a text file, for the error message.

    Raises:
        DataError: If the text is not UTF-8.
    """
    try:
        text.decode()
    except UnicodeDecodeError:
        raise DataError(f"{part.source.path}: changed since it was hashed; start again") from None
    return text


def _cut_record(text: bytes, is_val: bool, n_read: int) -> Iterator[Piece]:
    """Yield the text of a record as one piece, or in several pieces if it exceeds 1 MiB.

    Pieces of at most 64 KiB, which end with a line or a character, are then cut off until at most
    1 MiB is left, which is the last piece.

    Args:
        text: Text of the record in UTF-8.
        is_val: Whether the record belongs to the validation set.
        n_read: Bytes of the file that were read for the record. The last piece carries this number,
            the others carry 0.
    """
    while len(text) > 16 * BLOCK_BYTES:
        cut = cut_at(text[:BLOCK_BYTES])
        yield Piece(text[:cut], is_val, False, False, 0)
        text = text[cut:]
    yield Piece(text, is_val, True, True, n_read)


def _cut_before(source: Source, position: int) -> int:
    """Return the nearest byte offset, at or before `position`, at which a text file can be cut.

    This is the start of the line that contains `position`. If there is no line end in the 4 KiB
    before it, as in the first line of a file or in a longer line, it is the start of the last
    character before `position`. The start and the end of the file are returned unchanged.

    Args:
        source: Text file.
        position: Byte offset in the file.

    Raises:
        OSError: If the file cannot be read.
    """
    if position in (0, source.size_bytes):
        return position
    start = max(0, position - _LINE_BYTES)
    with open_regular(source.path) as file:
        file.seek(start)
        return start + cut_at(file.read(position - start))


def _with_newline(text: bytes) -> bytes:
    """Return a text, with a newline added at its end if it does not end with one."""
    return text if text.endswith(b"\n") else text + b"\n"


def _matches(name: str, pattern: str) -> bool:
    """Return whether the name of a file matches a pattern with wildcards, such as `*.py`.

    Args:
        name: Path of the file below the folder of the corpus, with slashes.
        pattern: Pattern of the file's name, or of the full `name` if the pattern has a slash.
    """
    return fnmatch(name if "/" in pattern else name.rpartition("/")[2], pattern)
