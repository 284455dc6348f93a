"""Reader of a JSON file that is one array, or one object with an array under the key "data".

Memory holds one element and one block of the file, whatever the length of the array.
"""

import codecs
import json
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
            DataError: If no JSON value follows, for example because the file has ended, if it is
                nested too deeply, or if it is incomplete after 2^28 characters.
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
        DataError: If there is no such array, if the file is damaged, or if more text follows the
            array.
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
    """Move past the opening bracket of the file's array, and return whether there is an array.

    The array is the value of the file, or the value of the key "data" of the file's object.

    Args:
        text: Text of the file, at its beginning.

    Raises:
        DataError: If the text before the array is not UTF-8 or not JSON.
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
