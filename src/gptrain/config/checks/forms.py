"""The forms a value may have, and what is wrong with one that has none of them."""

from __future__ import annotations

import re

from gptrain.config.checks.rules import INT32_MAX, Number, Text


def count(low: int = 1, example: int = 1, null: bool = False, also: tuple = ()) -> Number:
    """A whole number from `low` on."""
    return Number(example, null, low, INT32_MAX, whole=True, also=also)


def share(example: float, **options) -> Number:
    """A number from 0 to 1."""
    return Number(example, low=0, high=1, **options)


def devices(value: object) -> str | None:
    """Lightning's forms: a number, a list of ids, "0,1", "auto" or -1."""
    if isinstance(value, str):
        if value == "auto" or re.fullmatch(r"\d+(,\d*)+", value):
            value = "auto" if value == "auto" else [int(i) for i in value.split(",") if i]
        elif re.fullmatch(r"[+-]?\d+", value):
            value = int(value)
        else:
            return 'not a number, list or "auto"'
    if value == "auto":
        return None
    if isinstance(value, list):
        if not value:
            return "an empty list, need at least 1"
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            return "a list must hold device numbers, 0 or higher"
        return "a device is named twice" if len(set(value)) < len(value) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return 'not a number, list or "auto"'
    if value > INT32_MAX:
        return "too large (max 2^31-1)"
    return None if value >= 1 or value == -1 else "need at least 1"


def limit(value: object) -> str | None:
    """A share of the batches as a fraction, or how many as a whole number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return None if 0 <= value <= INT32_MAX else "must be >= 0"
    if not isinstance(value, float):
        return "not a number"
    return None if 0 <= value <= 1 else "a fraction must be in [0, 1]"


def interval(value: object) -> str | None:
    """A fraction of an epoch, or optimizer steps."""
    found = limit(value)
    return found or ("must be > 0" if value == 0 else None)


def duration(value: object) -> str | None:
    """Lightning's max_time: DD:HH:MM:SS, or days, hours, minutes, seconds by name."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d{1,9}):(\d\d):(\d\d):(\d\d)", value.strip())
        if not match:
            return "not a time DD:HH:MM:SS"
        return None if any(int(part) for part in match.groups()) else "must be longer than 0 s"
    if not isinstance(value, dict) or not value:
        return "not a time DD:HH:MM:SS"
    units = {"weeks", "days", "hours", "minutes", "seconds"}
    if unknown := sorted(str(unit) for unit in value if unit not in units):
        return f"{unknown[0]} is no unit of time"
    rule = Number(low=0, high=INT32_MAX)
    if any(rule.wrong(number) for number in value.values()):
        return "each part must be a number >= 0"
    return None if any(value.values()) else "must be longer than 0 s"


def fast_dev_run(value: object) -> str | None:
    """true, false, or how many batches."""
    return None if isinstance(value, bool) else count(0).judge(value)


def warmup(value: object) -> str | None:
    """Steps, or a share of the run."""
    if isinstance(value, float) and not value.is_integer():
        return None if 0 < value < 1 else "neither a whole number of steps nor a share below 1"
    found = Number(low=0, high=INT32_MAX).judge(value)
    return found


def name(value: object) -> str | None:
    """A name that makes a folder below the output folder."""
    found = Text(path=True).judge(value)
    if found:
        return found
    if value.startswith(("/", "~")) or ".." in value.split("/"):
        return "leaves the output folder"
    return None
