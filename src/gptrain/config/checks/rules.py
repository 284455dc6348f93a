"""What a single value may be: a number in a range, one of a few words, a text, a list.

A rule's `wrong(value)` is None where the value is right, else what is wrong with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from gptrain.config.names import nearest

INT32_MAX = 2**31 - 1  # token ids and tensor sizes beyond it meet 32-bit indices in kernels


@dataclass(eq=False)
class Wrong:
    """What is wrong with a value, and what is allowed instead."""

    what: str
    allowed: str = ""


@dataclass(eq=False)
class Rule:
    """A value of one kind.

    Attributes:
        example: a value that works, for `try:`.
        null: whether null is allowed.
    """

    example: object = None
    null: bool = False

    def wrong(self, value: object) -> Wrong | None:
        """None where the value is right."""
        if value is None:
            return None if self.null else Wrong("must not be null", self.allowed())
        found = self.judge(value)
        return Wrong(found, self.allowed()) if found else None

    def judge(self, value: object) -> str | None:
        """What is wrong with a value that is not null."""
        raise NotImplementedError

    def allowed(self) -> str:
        """What is right, in a few words."""
        return ""


@dataclass(eq=False)
class Number(Rule):
    """A finite number from `low` to `high`; `above` and `below` leave the ends out.

    Attributes:
        whole: no fraction, not even .0.
        also: numbers outside the range that are allowed all the same.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False
    whole: bool = False
    also: tuple = ()

    def judge(self, value: object) -> str | None:
        kind = "whole number" if self.whole else "number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"not a {kind}"
        if isinstance(value, float) and not math.isfinite(value):
            return "not a finite number"
        if self.whole and isinstance(value, float):
            return "not a whole number"
        if value in self.also:
            return None
        if value > self.high and (self.high == INT32_MAX or self.high >= 2**40):
            limit = "2^31-1" if self.high == INT32_MAX else f"{self.high:.3g}"
            return f"too large (max {limit})"
        low_ok = value > self.low if self.above else value >= self.low
        high_ok = value < self.high if self.below else value <= self.high
        return None if low_ok and high_ok else f"must be {self.range()}"

    def range(self) -> str:
        """The range as one writes it: `>= 1`, `[0, 1)`."""
        low, high = f"{self.low:.12g}", f"{self.high:.12g}"
        if self.high >= 2**40 or self.high == INT32_MAX:
            text = f"{'>' if self.above else '>='} {low}"
        elif self.whole:
            text = f"{low} .. {high}"
        else:
            text = f"in {'(' if self.above else '['}{low}, {high}{')' if self.below else ']'}"
        return ", or ".join([text, *map(str, self.also)])

    def allowed(self) -> str:
        kind = "a whole number " if self.whole else "a number "
        return kind + self.range() + (", or null" if self.null else "")


@dataclass(eq=False)
class Word(Rule):
    """One of a few words.

    Attributes:
        aliases: other spellings, taken and not shown.
    """

    words: tuple = ()
    aliases: tuple = ()

    def judge(self, value: object) -> str | None:
        if not isinstance(value, bool) and value in (*self.words, *self.aliases):
            return None
        near = nearest(str(value), map(str, self.words))
        return "unknown" + (f', did you mean "{near}"?' if near else "")

    def allowed(self) -> str:
        return ", ".join([*map(str, self.words), *(["null"] if self.null else [])])


@dataclass(eq=False)
class Flag(Rule):
    """true or false.

    Attributes:
        also: words that are allowed too.
    """

    also: tuple = ()

    def judge(self, value: object) -> str | None:
        return None if isinstance(value, bool) or value in self.also else "not true or false"

    def allowed(self) -> str:
        return ", ".join(["true", "false", *self.also, *(["null"] if self.null else [])])


@dataclass(eq=False)
class Text(Rule):
    """A text with something in it.

    Attributes:
        path: it names a file or folder of this machine.
    """

    path: bool = False

    def judge(self, value: object) -> str | None:
        if not isinstance(value, str):
            return "not a text"
        if not value.strip():
            return "empty"
        if "\0" in value:
            return "holds a NUL character"
        if self.path and value != value.strip():
            return "begins or ends with a space"
        if self.path and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
            return "remote; only paths of this machine are read and written"
        return None

    def allowed(self) -> str:
        return ("a path" if self.path else "a text") + (", or null" if self.null else "")


@dataclass(eq=False)
class Listing(Rule):
    """A list, each item by one rule.

    Attributes:
        length: of the list; None: any.
        alone: whether a single item may stand without brackets.
    """

    item: Rule | None = None
    length: int | None = None
    alone: bool = False

    def judge(self, value: object) -> str | None:
        if not isinstance(value, list):
            return self.item.judge(value) if self.alone else "not a list"
        if self.length is not None and len(value) != self.length:
            return f"{len(value)} items, must be {self.length}"
        if self.alone and not value:
            return "an empty list"
        for item in value:
            found = self.item.wrong(item)
            if found:
                return f"{item}: {found.what}"
        return None

    def allowed(self) -> str:
        items = f"a list of {self.length or 'items'}, each {self.item.allowed()}"
        return (f"{self.item.allowed()}, or " if self.alone else "") + items


@dataclass(eq=False)
class Either(Rule):
    """What a function finds right: it returns what is wrong, or None."""

    find: Callable[[object], str | None] = lambda _: None
    words: str = ""

    def judge(self, value: object) -> str | None:
        return self.find(value)

    def allowed(self) -> str:
        return self.words
