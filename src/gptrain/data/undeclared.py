"""Check that a file without a declared format, which counts as text, does not hold records.

A file whose name and content say nothing else is read as text. If it holds records, such as an
object of many texts, its keys and quotes would be trained on, too. It is therefore refused, with a
message that says how to read the records.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptrain.core import shell
from gptrain.core.errors import DataError

Place = tuple[tuple[str, ...], list | dict]  # keys that lead to records, and the records there
# A string, which the end of the text may cut, or a character outside of strings.
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[][{},]', re.DOTALL)
_MIN_TEXTS = 8  # an object of so many texts counts as texts by id, whatever its keys are
_MAX_KEYS = 4  # records are looked for under at most this many nested keys


def check_no_records(path: Path, head: bytes, text_key: str) -> None:
    """Check that a file that would be read as text does not begin like a file of records.

    Args:
        path: Path of the file, for the message and its suffix.
        head: First bytes of the file.
        text_key: Key of the text in a record.

    Raises:
        DataError: If the file begins like a file of records. The message says how to read the
            records.
    """
    head = head.removeprefix(codecs.BOM_UTF8)
    if _is_json_lines(head, text_key):
        format = "jsonl"
        message = "JSON lines, whose keys and quotes would be trained on, too"
    elif _is_array(head):
        format = "json"
        message = "a JSON array of records, whose keys and quotes would be trained on, too"
    elif path.suffix.lower() == ".json" and (places := _find_records(head.decode(errors="ignore"))):
        keys, command = _extraction_command(path, places)
        place = f"under {keys} of" if keys else "by id of"
        message = f"records {place} a JSON object, whose keys and quotes would be trained on, too"
        hint = f"{command}, or data.format=text"
        raise DataError(f"{path}: {message}; try: {hint}")
    else:
        return
    hint = f"data.format={format} data.text_key=<key>, or data.format=text"
    raise DataError(f"{path}: {message}; try: {hint}")


def _extraction_command(path: Path, places: Sequence[Place]) -> tuple[str, str]:
    """Return the keys of a JSON object's records, and a command that writes them as JSON lines.

    The records are those of the first place and all others of the same form whose keys differ from
    its keys, such as a list of texts under each of many ids.

    Args:
        path: JSON file. The command writes to the same path with an additional `l`.
        places: Places of records at the beginning of the file, at least one.

    Returns:
        The keys that lead to the records, joined by dots, with `*` in place of a key that differs;
        and the shell command.
    """
    first_keys, records = places[0]
    form = _form(records)
    alike = [k for k, other in places if len(k) == len(first_keys) and _form(other) == form]
    value = f"json.load(open({_literal(str(path))}))"
    loops = ""
    shown = []
    for depth, key in enumerate(first_keys):
        if all(keys[depth] == key for keys in alike):
            shown.append(key)
            value += f".get({_literal(key)}, [])" if loops else f"[{_literal(key)}]"
            continue
        shown.append("*")
        kind = form[0] if depth == len(first_keys) - 1 else "dict"
        loops += f" for v{depth} in {value}.values() if isinstance(v{depth}, {kind})"
        value = f"v{depth}"
    container, kind = form
    value += ".values()" if container == "dict" else ""
    only = f" if isinstance(r, {kind})" if loops else ""
    line = "r" if kind == "dict" else '{"text": r}'
    code = f"import json; [print(json.dumps({line})){loops} for r in {value}{only}]"
    return ".".join(shown), f"{shell.command('python', '-c', code)} > {shell.command(f'{path}l')}"


def _form(records: list | dict) -> tuple[str, str]:
    """Return the names of the types of some records' container and of the first record.

    The first record is the first value that is an object or a string. There must be one.
    """
    values = records.values() if isinstance(records, dict) else records
    record = next(value for value in values if isinstance(value, dict | str))
    return type(records).__name__, type(record).__name__


def _literal(text: str) -> str:
    """Return a text as a string literal of Python."""
    return json.dumps(text, ensure_ascii=False)


def _is_json_lines(head: bytes, text_key: str) -> bool:
    """Return whether a file begins like JSON lines: with two lines that are JSON objects.

    If there is only one line, it must be an object with the key `text_key`.

    Args:
        head: First bytes of the file.
        text_key: Key of the text in a record.
    """
    lines = [line for line in head.splitlines()[:8] if line.strip()][:2]
    try:
        records = [json.loads(line) for line in lines if line.lstrip().startswith(b"{")]
    except (ValueError, RecursionError):
        return False
    return len(records) == 2 or (len(lines) == len(records) == 1 and text_key in records[0])


def _is_array(head: bytes) -> bool:
    """Return whether a file begins with a JSON array whose first element is a non-empty object.

    Args:
        head: First bytes of the file, which must contain the complete first element.
    """
    begin = re.match(rb"\s*\[\s*(?=\{)", head)
    try:
        text = head[begin.end() :].decode(errors="ignore") if begin else ""
        return bool(begin) and bool(json.JSONDecoder().raw_decode(text)[0])
    except (ValueError, RecursionError):
        return False


def _find_records(head: str) -> list[Place]:
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

    The text is cut at its last comma outside of a string, and the closing brackets and braces of
    all arrays and objects that are open there are added. A complete text is returned unchanged, and
    so is a text without such a comma, which stays invalid if it is cut.
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

    Records under more than four nested keys, or in arrays of other values, are not found.

    Args:
        value: JSON value that is searched, with the values in it.
        keys: Keys that lead from the file's value to this value.
    """
    if isinstance(value, list) and _are_records(value):
        yield keys, value
    elif isinstance(value, dict):
        values = list(value.values())
        are_objects = len(values) > 1 and all(isinstance(child, dict) for child in values)
        if (are_objects or _are_texts_by_id(value)) and _are_records(values, n_alike=2):
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
