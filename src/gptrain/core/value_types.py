"""Types of config values, such as numbers in a range and local paths, and base classes of groups.

The validators run inside pydantic. The message of a ValueError is printed after `error: <key>=...`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WrapValidator

from gptrain.core.precision import PRECISIONS, SHORT_NAMES

WORKERS_MAX = 384  # cores of the largest two-socket x86 server of 2025 (2 x AMD EPYC 9965)
_MOST_RANKS = 1024  # ranks on one machine; a larger number is a typing error
_INT32_MAX = 2**31 - 1  # largest index that kernels with 32-bit indices can address


def between(low: int, high: int = _INT32_MAX) -> Any:
    """Return a pydantic field for a number from `low` to `high`, both included.

    It is used as `Annotated[int, between(1, 9)]`.
    """
    return Field(ge=low, le=high)


def _local(value: str | list[str]) -> Any:
    """Check that a value is a local path or a list of local paths, and return the value."""
    for path in [value] if isinstance(value, str) else value or [""]:
        if not path or path != path.strip() or "\0" in path:
            raise ValueError("not a path")
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
            raise ValueError("remote; download it, check the hash, pass a local path")
    return value


def _devices(value: Any) -> Any:
    """Return a value of `trainer.devices` as a number, a list of device numbers or "auto"."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+|\d+(,\d*)+", value):
        value = [int(part) for part in value.split(",") if part] if "," in value else int(value)
    if isinstance(value, list):
        is_typed = all(type(index) is int and index >= 0 for index in value)
        if not value or not is_typed or len(set(value)) < len(value):
            raise ValueError("a list must contain device indices, 0 or higher, each once")
    elif value != "auto" and type(value) is not int:
        raise ValueError('not a number, list or "auto"')
    elif value not in ("auto", -1) and not 1 <= value <= _MOST_RANKS:
        raise ValueError("need at least 1" if value < 1 else f"too large (max {_MOST_RANKS})")
    return "auto" if value == -1 else value


Count = Annotated[int, between(1)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=_INT32_MAX)]  # above, gloo waits for no time at all
NonNegative = Annotated[float, Field(ge=0)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
LocalPath = Annotated[str, AfterValidator(_local)]
LocalPaths = Annotated[str | list[str], AfterValidator(_local)]
Devices = Annotated[Any, BeforeValidator(_devices)]
PrecisionName = Annotated[  # the full name of a precision, such as 16-mixed for 16
    Literal[("auto", *PRECISIONS)],  # ty: ignore[invalid-type-form]
    BeforeValidator(lambda name: SHORT_NAMES.get(str(name), name)),
]
Duration = (  # DD:HH:MM:SS or {hours:2,minutes:30}
    Annotated[str, Field(pattern=r"^\d+:\d\d:\d\d:\d\d$")]
    | dict[Literal["weeks", "days", "hours", "minutes", "seconds"], NonNegative]
)
Share = Annotated[int, between(0)] | Fraction  # a number of steps or batches, or a part of all
Interval = Count | Annotated[float, Field(gt=0, le=1)]  # optimizer steps, or a part of an epoch
TokenCount = Annotated[float, Field(ge=1, le=2**63)]


class KeepsResult:
    """Mark in the type of a key that may have another value when a run is resumed.

    The class itself is the mark: `Annotated[Count, KeepsResult]`. It is for keys that do not change
    what a run computes, or whose effect a resume compares in another way, as `data.batch_size`. It
    has an effect in the groups model, module, data, optimizer and scheduler.
    """


class Section(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Base class of a group of keys. A key that is not a field is a validation error of pydantic.

    So are a value of another type, such as a string for a number, and a NaN or an infinity.
    """

    def plain(self, **options: Any) -> dict[str, Any]:
        """Return the keys that were given, also unknown ones, as nested dicts and lists.

        Fields that have their default because no file and no override sets them are left out.
        `options` are further options of pydantic's `model_dump`, such as `exclude`.
        """
        return self.model_dump(by_alias=True, exclude_unset=True, serialize_as_any=True, **options)


class OpenSection(Section, extra="allow"):
    """Base class of a group that may have keys without a field, of any type."""


class TargetConfig(OpenSection):
    """Node whose `_target_` names the class or function that builds an object.

    Attributes:
        OWN_KEYS: Keys that gptrain reads itself. All others are keyword arguments of the target.
        target: Dotted path of the class or function.
    """

    OWN_KEYS: ClassVar[frozenset[str]] = frozenset()

    target: str = Field(alias="_target_")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the target that were given, as nested dicts and lists."""
        return {k: v for k, v in self.plain().items() if k not in {"_target_", *self.OWN_KEYS}}

    def node(self) -> dict[str, Any]:
        """Return the node for Hydra's `instantiate`: `_target_` and its keyword arguments."""
        return {"_target_": self.target, **self.arguments}


def chosen(kinds: Mapping[str, type[Section]], read_name: Callable[[Any], object]) -> Any:
    """Return the mark of a group whose section type depends on one of its values.

    It is written as `Annotated[ModelConfig, chosen(kinds, read_name)]`.

    Args:
        kinds: Type of the section by name. A group with another name, such as that of a user's
            class, has the annotated type.
        read_name: Function that returns the name for a group, which is a dict that is not validated
            yet.
    """

    def validate(node: Any, of_other_name: Callable[[Any], Section]) -> Section:
        kind = kinds.get(str(read_name(node))) if isinstance(node, dict) else None
        return kind.model_validate(node) if kind else of_other_name(node)

    return WrapValidator(validate)
