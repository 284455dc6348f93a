"""The forms that a value may have, as pydantic types whose refusals are short."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictStr,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

MOST_RANKS = 1024  # of one machine; more is a slip of the finger
INT32_MAX = 2**31 - 1  # token ids and tensor sizes beyond it meet 32-bit indices in kernels


def refuse(words: str) -> PydanticCustomError:
    """What a validator raises."""
    return PydanticCustomError("refused", "{words}", {"words": words})


def says(words: str, kind: Any) -> Any:
    """A type with one message for whatever is wrong with its value."""

    def judge(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            too_large = error.errors()[0].get("ctx", {}).get("le") == INT32_MAX
            raise refuse("too large (max 2^31-1)" if too_large else words) from None

    return Annotated[kind, WrapValidator(judge)]


def integer(low: int, high: int = INT32_MAX) -> Any:
    """An integer from low to high."""
    bounds = f">= {low}" if high == INT32_MAX else f"in {low} .. {high}"
    return says(f"must be an integer {bounds}", Annotated[_Int, Field(ge=low, le=high)])


def number(words: str, **bounds: float) -> Any:
    """A finite number within bounds."""
    return says(words, Annotated[_Float, Field(allow_inf_nan=False, **bounds)])


def _local_path(value: str) -> str:
    if not value.strip() or "\0" in value or value != value.strip():
        raise refuse("not a path")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        raise refuse("remote; download it, check the hash, pass a local path")
    return value


def _name_below(value: str) -> str:
    if value.startswith(("/", "~")) or ".." in value.split("/"):
        raise refuse("leaves the output folder")
    return value


def _devices(value: Any) -> Any:
    found = value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+|\d+(,\d*)+", value):
        found = [int(part) for part in value.split(",") if part] if "," in value else int(value)
    if isinstance(found, list):
        if not found or not all(type(one) is int and one >= 0 for one in found):
            raise refuse("a list must hold device numbers, 0 or higher")
        if len(set(found)) < len(found):
            raise refuse("a device is named twice")
    elif found != "auto" and type(found) is not int:
        raise refuse('not a number, list or "auto"')
    elif found not in ("auto", -1) and not 1 <= found <= MOST_RANKS:
        raise refuse("need at least 1" if found < 1 else f"too large (max {MOST_RANKS})")
    return value


def _with_target(value: dict[str, Any]) -> dict[str, Any]:
    if "_target_" not in value:
        raise refuse("has no _target_, nothing says what to build")
    return value


_Int, _Float, _Bool = (Annotated[kind, Field(strict=True)] for kind in (int, float, bool))
Count = integer(1)
Positive = number("must be > 0", gt=0, le=INT32_MAX)
NotNegative = number("must be >= 0", ge=0)
BelowOne = number("must be in [0, 1)", ge=0, lt=1)
Fraction = number("must be in [0, 1]", ge=0, le=1)
Flag = says("not true or false", _Bool)
FlagOrWarn = says("must be true, false or warn", _Bool | Literal["warn"])
Name = says("not a name", Annotated[StrictStr, Field(min_length=1)])
Names = says("not a list of names", list[StrictStr])
Path = Annotated[says("not a path", StrictStr), AfterValidator(_local_path)]
Paths = Path | Annotated[list[Path], Field(min_length=1)]
RunName = Annotated[Path, AfterValidator(_name_below)]
Devices = Annotated[Any, BeforeValidator(_devices)]
Node = says("not a group of keys", dict[str, Any])
Target = Annotated[Node, AfterValidator(_with_target)]
Betas = says(
    "must be two numbers in [0, 1)", Annotated[list[BelowOne], Field(min_length=2, max_length=2)]
)
MaxEpochs = says("must be >= 1, -1 for no limit, or null", Literal[-1] | Count)
MaxSteps = says(
    "must be >= 1, or -1 for no limit together with trainer.max_time or trainer.max_epochs",
    Literal[-1] | Annotated[_Int, Field(ge=1, le=2**40)],
)
Duration = says(
    "not a time DD:HH:MM:SS or {hours:2,minutes:30}",
    Annotated[StrictStr, Field(pattern=r"^\d+:\d\d:\d\d:\d\d$")]
    | dict[Literal["weeks", "days", "hours", "minutes", "seconds"], NotNegative],
)
Batches = says("must be true, false, or an integer >= 0", _Bool | Annotated[_Int, Field(ge=0)])
Limit = says("must be a fraction in [0, 1], or an integer >= 0", integer(0) | Fraction)
Interval = says(
    "must be a fraction of an epoch in (0, 1], or optimizer steps >= 1",
    Count | Annotated[_Float, Field(gt=0, le=1)],
)
Warmup = says(
    "must be an integer of steps >= 0, a fraction of the run below 1, or null",
    integer(0) | BelowOne | Annotated[_Float, Field(ge=0, multiple_of=1, le=INT32_MAX)],
)
