"""A corpus: which files it is made of, how it is split, and its bytes, block by block.

A document is one UTF-8 file. Documents follow each other in the order of their names; one that
does not end with a newline gets one, and nothing else is put between them, so that every token
of every tokenizer stands for bytes of text.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from gptrain.small_files import DataError

BLOCK_BYTES = 2**16
# Other packages; and tests, some of which are deliberately no UTF-8.
_NO_SOURCE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_SECTION_BYTES = 2**14  # about a source file: many make a fair sample, few words lose context
_MAX_SECTIONS = 2**16
_LINE_BYTES = 2**12  # longer lines may be cut between two parts


@dataclass(frozen=True, order=True)
class Document:
    """One file of a corpus, by its name within it (posix, relative to the folder given)."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, name: str, path: Path) -> "Document":
        """The document of a file as it is now."""
        status = path.stat()
        return cls(name, path, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Part:
    """A document's bytes from `start` to `stop`."""

    document: Document
    start: int
    stop: int


def default_corpus() -> list[Document]:
    """The Python standard library's own source without its tests: about 12 MB."""
    return _walk(Path(sysconfig.get_path("stdlib")), "*.py", without=_NO_SOURCE)


def find_documents(
    path: str | os.PathLike | Sequence[str | os.PathLike] | None, pattern: str = "*"
) -> list[Document]:
    """Documents of a file, a folder with all below it, or a list of them; sorted by name.

    Args:
        path: None for `default_corpus`.
        pattern: that names of files within folders must match, as `*.py`; one with a slash is
            matched with the whole name. Hidden files and folders are left out.
    Raises: FileNotFoundError; DataError if nothing matches.
    """
    found = []
    if path is None:
        found = [doc for doc in default_corpus() if _matches(doc.name, pattern)]
    for one in [path] if isinstance(path, (str, os.PathLike)) else path or []:
        one = Path(one).expanduser().resolve(strict=True)
        if one.is_dir():
            found += _walk(one, pattern)
        elif one.is_file():
            found.append(Document.of(one.name, one))
        else:  # a named pipe would block for ever
            raise DataError(f"{one}: neither a regular file nor a folder")
    if not found:
        raise DataError(f"{path}: no file matches {pattern!r}")
    return sorted(set(found))  # a folder and a file in it may both be named


def hash_document(document: Document) -> str | None:
    """SHA-256 of a document's bytes, None if they are no UTF-8."""
    digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
    try:
        with document.path.open("rb") as file:
            while block := file.read(2**20):
                decoder.decode(block)
                digest.update(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return digest.hexdigest()


def split(documents: Sequence[Document], val_fraction: float) -> tuple[list[Part], list[Part]]:
    """Train and validation parts: the same bytes whatever the tokenizer.

    Sections of 16 KiB (1/65536 of the corpus, if more) go to validation in the order of the hash
    of their document's name and place, until its fraction of the bytes is full; the one that does
    not fit gives its last lines. So files below 16 KiB stay whole, no large one makes up the
    validation set alone, and a file that is added moves few others. Sections begin and end with
    lines.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction}: must be between 0 and 1")
    total_bytes = sum(doc.size_bytes for doc in documents)
    section_bytes = max(_SECTION_BYTES, total_bytes // _MAX_SECTIONS)
    sections = [
        (hashlib.sha256(os.fsencode(doc.name) + b" %d" % start).digest(), doc, start)
        for doc in documents
        for start in range(0, doc.size_bytes, section_bytes)
    ]
    chosen: dict[Document, list[tuple[int, int]]] = {doc: [] for doc in documents}
    wanted_bytes = int(val_fraction * total_bytes)
    for _, doc, start in sorted(sections):
        stop = min(start + section_bytes, doc.size_bytes)
        start = max(start, stop - wanted_bytes)
        chosen[doc].append((_cut_before(doc, start), _cut_before(doc, stop)))
        wanted_bytes -= stop - start
        if wanted_bytes <= 0:
            break
    train, val = [], []
    for doc, ranges in chosen.items():
        done = 0
        for start, stop in sorted(ranges):
            train.append(Part(doc, done, start))
            val.append(Part(doc, start, stop))
            done = stop
        train.append(Part(doc, done, doc.size_bytes))
    return [p for p in train if p.start < p.stop], [p for p in val if p.start < p.stop]


def read_blocks(parts: Iterable[Part], block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The text of parts, in blocks of whole characters, and of whole lines unless one is longer.

    A cut ends a token: white space around it may have others than in the uncut text.
    """
    for part in parts:
        left, rest = part.stop - part.start, b""
        with part.document.path.open("rb") as file:
            file.seek(part.start)
            while left and (read := file.read(min(block_bytes, left))):
                left -= len(read)
                rest += read
                if left:
                    cut = cut_at(rest)
                    yield rest[:cut]
                    rest = rest[cut:]
        yield rest if rest.endswith(b"\n") else rest + b"\n"


def cut_at(block: bytes) -> int:
    """Where to cut a block: after its last newline, failing that before its last character."""
    if newline := block.rfind(b"\n") + 1:
        return newline
    places = range(max(0, len(block) - 4), len(block))  # a character has 4 bytes at most
    return max((i for i in places if block[i] & 0xC0 != 0x80), default=0)  # no continuation byte


def _cut_before(document: Document, position: int) -> int:
    """Where the line begins in which `position` lies, in a long line the character before."""
    if position in (0, document.size_bytes):
        return position
    start = max(0, position - _LINE_BYTES)
    with document.path.open("rb") as file:
        file.seek(start)
        return start + cut_at(file.read(position - start))


def _walk(root: Path, pattern: str, without: frozenset[str] = frozenset()) -> list[Document]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in without]
        for file in files:
            path = Path(folder, file)
            name = path.relative_to(root).as_posix()
            if file[0] != "." and _matches(name, pattern) and path.is_file():
                found.append(Document.of(name, path))
    return found


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name if "/" in pattern else name.rpartition("/")[2], pattern)
