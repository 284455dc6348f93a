"""Format of what commands print: labelled lines such as `result    100 steps`, and counts."""

_WIDTH = 10  # characters of the label's column, with the space after the label


def line(label: str, text: object) -> str:
    """Return one printed line: the label, padded to a column of ten characters, and the text.

    Further lines of the text are indented by the same ten characters.
    """
    indented = str(text).replace("\n", "\n" + " " * _WIDTH)
    return f"{label:{_WIDTH - 1}} {indented}"


def count_text(n: int, noun: str) -> str:
    """Return a number and its noun, with an s unless the number is 1: `1 step`, `2 steps`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
