"""The forms that a value may have, as pydantic types whose refusals are short."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PlainValidator,
    StrictStr,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from gptrain.config.suggest import nearest

INT32_MAX = 2**31 - 1  # token ids and tensor sizes beyond it meet 32-bit indices in kernels
SEED_MAX = 2**32 - 1  # numpy's generators take no more
WORKERS_MAX = 384  # cores of the largest two-socket x86 server of 2025 (2 x AMD EPYC 9965)


def wrong(message: str, allowed: str = "") -> PydanticCustomError:
    """What a validator raises: the words of the refusal."""
    return PydanticCustomError("gptrain", "{message}", {"message": message, "allowed": allowed})


def says(message: str, kind: Any) -> Any:
    """A type with one message for whatever is wrong with its value."""

    def judge(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            (first, *_) = error.errors()
            too_large = first.get("ctx", {}).get("le") == INT32_MAX
            raise wrong("too large (max 2^31-1)" if too_large else message) from None

    return Annotated[kind, WrapValidator(judge)]


def integer(low: int, high: int = INT32_MAX, words: str = "") -> Any:
    """An integer from low to high."""
    range_ = f">= {low}" if high == INT32_MAX else f"in {low} .. {high}"
    kind = Annotated[int, Field(strict=True, ge=low, le=high)]
    return says(words or f"must be an integer {range_}", kind)


def number(words: str, **bounds: float) -> Any:
    """A finite number within bounds."""
    return says(words, Annotated[float, Field(strict=True, allow_inf_nan=False, **bounds)])


def choice(*words: Any, unlisted: tuple = ()) -> Any:
    """One of a few words; those unlisted are accepted without being offered."""

    def judge(value: Any) -> Any:
        if value in (*words, *unlisted) and not isinstance(value, bool):
            return value
        near = nearest(str(value), words)
        raise wrong("unknown" + (f', did you mean "{near}"?' if near else ""), ", ".join(words))

    return Annotated[Any, PlainValidator(judge)]


def path(value: Any) -> str:
    """The name of a file or folder of this machine."""
    if not isinstance(value, str) or not value.strip() or "\0" in value or value != value.strip():
        raise wrong("not a path")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        raise wrong("remote; only paths of this machine are read and written")
    return value


def paths(value: Any) -> Any:
    """A path or a list of them."""
    if value == []:
        raise wrong("an empty list")
    return [path(item) for item in (value if isinstance(value, list) else [value])]


def checkpoint_path(value: Any) -> str:
    """A path, `last` or `best`."""
    if isinstance(value, str) and "://" in value:
        raise wrong("remote checkpoints are off; download, check the hash, pass a local path")
    return path(value)


def run_name(value: Any) -> str:
    """A name that makes a folder below the output folder."""
    if path(value).startswith(("/", "~")) or ".." in value.split("/"):
        raise wrong("leaves the output folder")
    return value


def devices(value: Any) -> Any:
    """Lightning's forms: a number, a list of device numbers, "0,1", "auto" or -1."""
    listed = value
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d*)+", value):
        listed = [int(part) for part in value.split(",") if part]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        listed = int(value)
    if listed == "auto" or (listed == -1 and not isinstance(listed, bool)):
        return value
    if isinstance(listed, list):
        if not all(type(one) is int and one >= 0 for one in listed) or not listed:
            raise wrong("a list must hold device numbers, 0 or higher")
        if len(set(listed)) < len(listed):
            raise wrong("a device is named twice")
        return value
    if type(listed) is not int:
        raise wrong('not a number, list or "auto"')
    if not 1 <= listed <= INT32_MAX:
        raise wrong("need at least 1" if listed < 1 else "too large (max 2^31-1)", '1.., or "auto"')
    return value


def duration(value: Any) -> Any:
    """Lightning's max_time: DD:HH:MM:SS, or its parts by name."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}:\d\d:\d\d:\d\d", value.strip()):
        parts = value.split(":")
    elif isinstance(value, dict) and value.keys() <= {
        "weeks",
        "days",
        "hours",
        "minutes",
        "seconds",
    }:
        parts = list(value.values())
    else:
        raise wrong("not a time", "DD:HH:MM:SS, {hours:2,minutes:30}, or null")
    if isinstance(value, dict) and not all(type(p) in (int, float) and p >= 0 for p in parts):
        raise wrong("each part must be a number >= 0")
    if not any(map(float, parts)):
        raise wrong("must be longer than 0 s")
    return value


Count = integer(1)
CountOrNone = integer(0)
Positive = number("must be > 0", gt=0)
Seconds = number("must be > 0 seconds", gt=0, le=INT32_MAX)
NotNegative = number("must be >= 0", ge=0)
BelowOne = number("must be in [0, 1)", ge=0, lt=1)
Fraction = number("must be in [0, 1]", ge=0, le=1)
Flag = says("not true or false", Annotated[bool, Field(strict=True)])
Path = Annotated[Any, PlainValidator(path)]
Paths = Annotated[Any, PlainValidator(paths)]
Words = says("not a list of names", list[StrictStr])
Name = says("not a name", Annotated[str, Field(strict=True, min_length=1)])
FractionOf = Annotated[float, Field(strict=True, ge=0, le=1)]
Limit = says(
    "must be a fraction in [0, 1], or an integer >= 0",
    Annotated[int, Field(strict=True, ge=0, le=INT32_MAX)] | FractionOf,
)
Interval = says(
    "must be a fraction of an epoch in (0, 1], or optimizer steps >= 1",
    Annotated[int, Field(strict=True, ge=1)] | Annotated[float, Field(strict=True, gt=0, le=1)],
)
Batches = says(
    "must be true, false, or an integer >= 0",
    Annotated[bool, Field(strict=True)] | Annotated[int, Field(strict=True, ge=0)],
)
Warmup = says(
    "must be an integer of steps >= 0, a fraction of the run below 1, or null",
    Annotated[int, Field(strict=True, ge=0)]
    | Annotated[float, Field(strict=True, gt=0, lt=1)]
    | Annotated[float, Field(strict=True, ge=0, multiple_of=1, le=INT32_MAX)],
)
Betas = says(
    "must be two numbers in [0, 1)", Annotated[list[BelowOne], Field(min_length=2, max_length=2)]
)
Node = says("not a group of keys", dict[str, Any])
OnOrWarn = says(
    "must be true, false or warn", Annotated[bool, Field(strict=True)] | Literal["warn"]
)
