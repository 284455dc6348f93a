"""Types of config values: numbers in a range, local paths, devices, durations; and of groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    WrapValidator,
)

from gptrain.core.lengths import warmup_steps

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


def _as_given(value: Any, check: Callable[[Any], float]) -> Any:
    """Check a number and return it as it was given: an integer stays an integer."""
    check(value)
    return value


AS_GIVEN = WrapValidator(_as_given)
Count = Annotated[int, between(1)]
Kept = Annotated[Count, AfterValidator(_kept)]  # newest checkpoints
Positive = Annotated[float, Field(gt=0, le=INT32_MAX), AS_GIVEN]
PositiveNumber = Annotated[float, Field(gt=0), AS_GIVEN]
NonNegative = Annotated[float, Field(ge=0), AS_GIVEN]
AtLeastOne = Annotated[float, Field(ge=1), AS_GIVEN]
BelowOne = Annotated[float, Field(ge=0, lt=1), AS_GIVEN]
Fraction = Annotated[float, Field(ge=0, le=1), AS_GIVEN]
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
    | dict[Literal["weeks", "days", "hours", "minutes", "seconds"], NonNegative]
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
TokenCount = Annotated[float, Field(ge=1, le=2**63), AS_GIVEN]
Warmup = Annotated[float, Field(ge=0, le=INT32_MAX), AfterValidator(_steps), AS_GIVEN]


class Section(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """A group of keys, all of which are known."""

    def plain(self) -> dict[str, Any]:
        """Return the keys of the section, as they were given, as nested dicts and lists."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class OpenSection(Section, extra="allow"):
    """A group of which gptrain reads some keys. All others belong to the user or to a class."""


class TargetConfig(OpenSection):
    """A node whose `_target_` names the class or function that builds an object.

    Attributes:
        target: Dotted name of the class or function.
        OWN_KEYS: Keys that gptrain reads itself. All other keys are arguments of the target.
    """

    OWN_KEYS: ClassVar[frozenset[str]] = frozenset()

    target: str = Field(alias="_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the target."""
        return {k: v for k, v in self.plain().items() if k not in {"_target_", *self.OWN_KEYS}}

    def node(self) -> dict[str, Any]:
        """Return what Hydra's `instantiate` needs: the target and its keyword arguments."""
        return {"_target_": self.target, **self.arguments}
