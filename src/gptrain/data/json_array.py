"""Records of a JSON file that is one array, or one object with an array under "data".

Memory holds one record and one block of the file, however long the array is.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gptrain.core.small_files import DataError

DATA_KEY = "data"
_BLOCK_BYTES = 2**16
_HEAD_BYTES = 2**20  # part of a file that decides whether the file is an array of records
_LONGEST_VALUE = 2**28  # characters
# Longest piece of JSON that is an error where the text is cut inside it: "\ud83d\ude00" has 12
# characters, and -Infinity has 9.
_CUT_CHARS = 16
_DECODER = json.JSONDecoder()


class JsonText:
    """The text of a JSON file, of which a window is in memory.

    Args:
        path: Name of the file in messages.
        stream: Bytes of the file, decompressed.
        limit_bytes: Bytes after which the file counts as ended. None reads all of it.

    Raises:
        DataError: From every method, for text that is no UTF-8 or no JSON.
    """

    def __init__(self, path: Path, stream: BinaryIO, limit_bytes: int | None = None) -> None:
        self.path, self._stream, self._left_bytes = path, stream, limit_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text, self._at, self._is_ended = "", 0, False

    def next_char(self) -> str:
        """Return the next character that is no space, without passing it; "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in " \t\r\n":
                    return self._text[self._at]
                self._at += 1
            if self._is_ended:
                return ""
            self._read_more()

    def passes(self, char: str) -> bool:
        """Pass the next character if it is this one, and return whether it was."""
        if self.next_char() != char:
            return False
        self._at += 1
        return True

    def read_value(self) -> object:
        """Pass the next JSON value and return it."""
        self.next_char()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or self._is_ended:  # else a number may continue
                    self._at = end
                    return value
            except RecursionError:
                raise DataError(f"{self.path}: nested too deeply") from None
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string")
                is_cut = is_cut or error.pos >= len(self._text) - _CUT_CHARS
                is_long = len(self._text) - self._at > _LONGEST_VALUE
                if self._is_ended or is_long or not is_cut:
                    raise DataError(f"{self.path}: broken JSON ({error.msg})") from None
            self._read_more()

    def _read_more(self) -> None:
        """Drop what was passed and read as much as is kept, so that a long value costs O(n)."""
        self._text, self._at = self._text[self._at :], 0
        n_bytes = max(_BLOCK_BYTES, len(self._text))
        if self._left_bytes is not None:
            n_bytes = min(n_bytes, self._left_bytes)
            self._left_bytes -= n_bytes
        block = self._stream.read(n_bytes)
        self._is_ended = not block
        try:
            self._text += self._decoder.decode(block, final=self._is_ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: no UTF-8 text ({error.reason})") from None


def holds_array(path: Path, stream: BinaryIO) -> bool:
    """Return whether a JSON file is an array of records or texts, or has one under "data".

    Only the head of the file is read. An array of numbers or of arrays is no array of records, nor
    is an empty one.
    """
    text = JsonText(path, stream, _HEAD_BYTES)
    try:
        is_object = text.next_char() == "{"
        return _enter_array(text) and text.next_char() in ("{" if is_object else '{"')
    except DataError:
        return False


def read_array(path: Path, stream: BinaryIO) -> Iterator[object]:
    """Yield each element of the array that a JSON file is, or that it has under "data".

    Raises:
        DataError: If there is no such array, or the file is damaged.
    """
    text = JsonText(path, stream)
    is_object = text.next_char() == "{"
    if not _enter_array(text):
        message = f'neither one JSON array nor an object with an array under "{DATA_KEY}"'
        raise DataError(f"{path}: {message}; try: data.format=jsonl, or data.format=text")
    is_open = not text.passes("]")
    while is_open:
        yield text.read_value()
        is_open = text.passes(",")
        if not is_open and not text.passes("]"):
            raise DataError(f"{path}: damaged (its array is not closed)")
    while is_object and text.passes(","):  # keys after the array
        text.read_value()
        if not text.passes(":"):
            raise DataError(f"{path}: broken JSON (no value of a key)")
        text.read_value()
    if (is_object and not text.passes("}")) or text.next_char():
        raise DataError(f"{path}: more text after the array; try: data.format=jsonl")


def _enter_array(text: JsonText) -> bool:
    """Move to the first element of the file's array and return True; False if it has none."""
    if text.passes("["):
        return True
    if not text.passes("{"):
        return False
    while text.next_char() == '"':
        key = text.read_value()
        if not text.passes(":"):
            return False
        if key == DATA_KEY and text.passes("["):
            return True
        text.read_value()
        if not text.passes(","):
            return False
    return False
