"""Reader of a JSON file that is one array, or one object with an array under the key "data".

Memory holds one element and one block of the file, whatever the length of the array. A file whose
records are under other keys cannot be read; `find_records` finds them, for an error message.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gptrain.core.errors import DataError

DATA_KEY = "data"
_BLOCK_BYTES = 2**16
_HEAD_BYTES = 2**20  # part of a file that decides whether the file is an array of records
_LONGEST_VALUE = 2**28  # characters
# If the text is cut inside a value, the decoder reports an error at most this many characters
# before the cut, unless a string is unterminated. The longest such pieces of JSON are
# "\ud83d\ude00" with 12 characters and -Infinity with 9.
_CUT_CHARS = 16
_DECODER = json.JSONDecoder()
# A string, which the end of the text may cut, or a character outside of strings.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[][{},]', re.DOTALL)
_MIN_TEXTS = 8  # an object of so many texts counts as texts by id, whatever its keys are
_MAX_KEYS = 4  # records are looked for under at most this many nested keys


class JsonText:
    """Text of a JSON file with a read position. Only a window of the text is kept in memory.

    Args:
        path: Name of the file in messages.
        stream: Decompressed bytes of the file.
        limit_bytes: Number of bytes after which the file counts as ended. None reads all bytes.

    Raises:
        DataError: From every method that reads, if the text is not UTF-8 or not JSON.
    """

    def __init__(self, path: Path, stream: BinaryIO, limit_bytes: int | None = None) -> None:
        self.path = path
        self._stream = stream
        self._left_bytes = limit_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._position = 0
        self._is_ended = False

    def peek_char(self) -> str:
        """Move to the next character that is not white space and return it, without moving past it.

        At the end of the file the result is the empty string.
        """
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in " \t\r\n":
                    return self._text[self._position]
                self._position += 1
            if self._is_ended:
                return ""
            self._read_more()

    def skip_char(self, char: str) -> bool:
        """Move past the next character if it is `char`, and return whether it was.

        White space before the character is always passed.
        """
        if self.peek_char() != char:
            return False
        self._position += 1
        return True

    def read_value(self) -> object:
        """Return the next JSON value, and move past it.

        Raises:
            DataError: If the text is not JSON, is nested too deeply, or if the value is incomplete
                after more than `_LONGEST_VALUE` characters.
        """
        self.peek_char()  # passes white space
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
                # A number at the end of the window may have more digits.
                if end < len(self._text) or self._is_ended:
                    self._position = end
                    return value
            except RecursionError:
                raise DataError(f"{self.path}: nested too deeply") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string")
                is_cut = is_cut or error.pos >= len(self._text) - _CUT_CHARS
                is_long = len(self._text) - self._position > _LONGEST_VALUE
                if self._is_ended or is_long or not is_cut:
                    raise DataError(f"{self.path}: broken JSON ({error.msg})") from None
            self._read_more()

    def _read_more(self) -> None:
        """Remove the text before the read position from memory, and read more text.

        At least as many bytes are read as characters are kept, unless the limit of the text is
        reached. So the time for a long value is linear in its length.

        Raises:
            DataError: If the file is not UTF-8.
        """
        self._text = self._text[self._position :]
        self._position = 0
        n_bytes = max(_BLOCK_BYTES, len(self._text))
        if self._left_bytes is not None:
            n_bytes = min(n_bytes, self._left_bytes)
            self._left_bytes -= n_bytes
        block = self._stream.read(n_bytes)
        self._is_ended = not block
        try:
            self._text += self._decoder.decode(block, final=self._is_ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: not UTF-8 text ({error.reason})") from None


def holds_array(path: Path, stream: BinaryIO) -> bool:
    """Return whether a JSON file is an array of objects or strings, or has objects under "data".

    The first element of the array decides, and only the beginning of the file is read. The result
    is False for an empty array, for an array of numbers or of arrays, and for text that is not
    JSON.

    Args:
        path: Name of the file in messages.
        stream: Decompressed bytes of the file.
    """
    text = JsonText(path, stream, _HEAD_BYTES)
    try:
        is_object = text.peek_char() == "{"
        first_chars = ("{",) if is_object else ("{", '"')
        return _enter_array(text) and text.peek_char() in first_chars
    except DataError:
        return False


def read_array(path: Path, stream: BinaryIO) -> Iterator[object]:
    """Yield the elements of a JSON array, or of the array under "data" of a JSON object.

    Args:
        path: Name of the file in messages.
        stream: Decompressed bytes of the file.

    Raises:
        DataError: If there is no such array, or if the file is damaged.
    """
    text = JsonText(path, stream)
    is_object = text.peek_char() == "{"
    if not _enter_array(text):
        message = f'neither one JSON array nor an object with an array under "{DATA_KEY}"'
        raise DataError(f"{path}: {message}; try: data.format=jsonl, or data.format=text")
    is_open = not text.skip_char("]")
    while is_open:
        yield text.read_value()
        is_open = text.skip_char(",")
        if not is_open and not text.skip_char("]"):
            raise DataError(f"{path}: damaged (its array is not closed)")
    while is_object and text.skip_char(","):  # keys after the array
        text.read_value()
        if not text.skip_char(":"):
            raise DataError(f"{path}: broken JSON (a key has no value)")
        text.read_value()
    if (is_object and not text.skip_char("}")) or text.peek_char():
        raise DataError(f"{path}: more text after the array; try: data.format=jsonl")


def _enter_array(text: JsonText) -> bool:
    """Move to the first element of the file's array, and return whether the file has an array.

    The array is the value of the file, or the value of the key "data" of the file's object.

    Args:
        text: Text of the file, at its beginning.
    """
    if text.skip_char("["):
        return True
    if not text.skip_char("{"):
        return False
    while text.peek_char() == '"':
        key = text.read_value()
        if not text.skip_char(":"):
            return False
        if key == DATA_KEY and text.skip_char("["):
            return True
        text.read_value()
        if not text.skip_char(","):
            return False
    return False


Place = tuple[tuple[str, ...], list | dict]  # keys that lead to records, and the records


def find_records(head: str) -> list[Place]:
    """Find the records in a JSON object, if they make up at least half of its text.

    It is used to refuse a file of records that would otherwise be trained on as one text with all
    keys and quotes. Records are the elements of an array, or the values of an object of records by
    id. Most of them are documents, or objects with the same keys that contain a document. A
    document is a string with white space or with characters outside of ASCII. Therefore
    package.json has no records: its longest arrays contain names. An object of documents by id has
    a digit in each key or at least eight keys. Otherwise it is one document, such as a title, an
    author and a text.

    Args:
        head: Text of a JSON file, or the beginning of the text.

    Returns:
        For each array or object of records the keys that lead to it, and its value. The longest one
        comes first. Empty if the text is not JSON, or if records make up less than half of it.
    """
    try:
        value = json.loads(_complete(head))
        places = sorted(_record_places(value, ()), key=_length, reverse=True)
        return places if 2 * sum(map(_length, places)) >= len(json.dumps(value)) else []
    except (ValueError, RecursionError):
        return []


def _length(place: Place) -> int:
    """Return the number of characters of the records at a place."""
    return len(json.dumps(place[1]))


def _complete(head: str) -> str:
    """Turn the beginning of a JSON text, which may end anywhere, into valid JSON.

    The text is cut after the last complete element, and the closing brackets and braces of all open
    arrays and objects are added. A complete text is returned unchanged.
    """
    open_ends: list[str] = []
    completed = head
    for match in _TOKENS.finditer(head):
        if match[0] in "{[":
            open_ends.append("}" if match[0] == "{" else "]")
        elif match[0] in "}]" and open_ends:
            open_ends.pop()
        elif match[0] == ",":
            completed = head[: match.start()] + "".join(reversed(open_ends))
    return completed if open_ends else head


def _record_places(value: object, keys: tuple[str, ...]) -> Iterator[Place]:
    """Yield each array or object of records in a JSON value, with the keys that lead to it.

    Args:
        value: JSON value that is searched, with the values in it.
        keys: Keys that lead from the file's value to this value.
    """
    if isinstance(value, list) and _are_records(value):
        yield keys, value
    elif isinstance(value, dict):
        objects = [child for child in value.values() if isinstance(child, dict)]
        are_objects = 1 < len(objects) == len(value)
        if (are_objects or _are_texts_by_id(value)) and _are_records(
            list(value.values()), n_alike=2
        ):
            yield keys, value
        elif len(keys) < _MAX_KEYS:
            for key, child in value.items():
                yield from _record_places(child, (*keys, key))


def _are_texts_by_id(value: dict) -> bool:
    """Return whether the values of a JSON object are strings and its keys are probably ids."""
    has_ids = len(value) >= _MIN_TEXTS or all(re.search(r"\d", key) for key in value)
    return has_ids and all(isinstance(child, str) for child in value.values())


def _are_records(values: list, n_alike: int = 1) -> bool:
    """Return whether at least half of the values are documents, or contain one under equal keys.

    Args:
        values: Elements of an array, or values of an object.
        n_alike: Smallest number of such values, if half of the values are fewer.
    """
    forms = Counter(
        tuple(value) if isinstance(value, dict) else type(value)
        for value in values
        if isinstance(value, dict | str) and _holds_document(value)
    )
    return max(forms.values(), default=0) >= max(n_alike, len(values) / 2)


def _holds_document(value: object, depth: int = 0) -> bool:
    """Return whether a value is a document or contains one. Objects within objects are left out.

    A document is a string with white space or with characters outside of ASCII.

    Args:
        value: JSON value.
        depth: 0 for a value of an array or object of records, 1 for a value inside of an object.
    """
    if isinstance(value, str):
        return not value.isascii() or any(map(str.isspace, value))
    if isinstance(value, list):
        return any(_holds_document(element) for element in value)
    if isinstance(value, dict) and depth == 0:
        return any(_holds_document(element, depth=1) for element in value.values())
    return False
