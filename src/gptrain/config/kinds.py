"""What a value of a config may be: numbers in a range, local paths, devices, durations, groups."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, NonNegativeFloat

from gptrain.lengths import warmup_steps

SEED_MAX = 2**32 - 1  # numpy's generators take no more
WORKERS_MAX = 384  # cores of the largest two-socket x86 server of 2025 (2 x AMD EPYC 9965)
MOST_RANKS = 1024  # of one machine; more is a slip of the finger
INT32_MAX = 2**31 - 1  # token ids and tensor sizes beyond it meet 32-bit indices in kernels


def between(low: int, high: int = INT32_MAX) -> Any:
    """Bounds of an integer, both allowed."""
    return Field(ge=low, le=high)


def _local(value: str | list[str]) -> Any:
    for path in [value] if isinstance(value, str) else value or [""]:
        if not path or path != path.strip() or "\0" in path:
            raise ValueError("not a path")
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
            raise ValueError("remote; download it, check the hash, pass a local path")
    return value


def _below(value: str) -> str:
    if value.startswith(("/", "~")) or ".." in value.split("/"):
        raise ValueError("leaves the output folder")
    return value


def _steps(value: float) -> float:
    warmup_steps(value, 1)  # raises what it cannot take
    return value


def _kept(value: int) -> int:
    """Refuse to keep one checkpoint only: a single disk error would lose the run."""
    if value < 2:
        raise ValueError("must be >= 2: where the newest is damaged, a run resumes from the other")
    return value


def _devices(value: Any) -> Any:
    found = value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+|\d+(,\d*)+", value):
        found = [int(part) for part in value.split(",") if part] if "," in value else int(value)
    if isinstance(found, list):
        if not found or not all(type(one) is int and one >= 0 for one in found):
            raise ValueError("a list must hold device numbers, 0 or higher")
        if len(set(found)) < len(found):
            raise ValueError("a device is named twice")
    elif found != "auto" and type(found) is not int:
        raise ValueError('not a number, list or "auto"')
    elif found not in ("auto", -1) and not 1 <= found <= MOST_RANKS:
        raise ValueError("need at least 1" if found < 1 else f"too large (max {MOST_RANKS})")
    return value


Count = Annotated[int, between(1)]
Kept = Annotated[Count, AfterValidator(_kept)]  # newest checkpoints
Positive = Annotated[float, Field(gt=0, le=INT32_MAX)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[str, AfterValidator(_local)]
LocalPaths = Annotated[str | list[str], AfterValidator(_local)]
RunName = Annotated[LocalPath, AfterValidator(_below)]
Devices = Annotated[Any, BeforeValidator(_devices)]
Betas = Annotated[
    Annotated[list[BelowOne], Field(min_length=2, max_length=2)],
    Field(description="two numbers in [0, 1)"),
]
Duration = Annotated[
    Annotated[str, Field(pattern=r"^\d+:\d\d:\d\d:\d\d$")]
    | dict[Literal["weeks", "days", "hours", "minutes", "seconds"], NonNegativeFloat]
    | None,
    Field(description="a time DD:HH:MM:SS or {hours:2,minutes:30}, or null"),
]
Batches = Annotated[
    bool | Annotated[int, between(0)], Field(description="true, false, or an integer >= 0")
]
Limit = Annotated[
    Annotated[int, between(0)] | Fraction | None,
    Field(description="a fraction in [0, 1], an integer >= 0, or null"),
]
Interval = Annotated[
    Count | Annotated[float, Field(gt=0, le=1)],
    Field(description="a fraction of an epoch in (0, 1], or optimizer steps >= 1"),
]
TokenCount = Annotated[float, Field(ge=1, le=2**63)]
Warmup = Annotated[float, Field(ge=0, le=INT32_MAX), AfterValidator(_steps)]


class Closed(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Every key is known."""


class Open(Closed, extra="allow"):
    """Keys that our code reads; every other key belongs to the `_target_`, or to the user."""


class Built(Open):
    """Any object that is made."""

    target: Any = Field(alias="_target_")
