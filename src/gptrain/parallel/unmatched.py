"""The difference between the tensors of a net and those of a checkpoint."""

from collections.abc import Iterable
from typing import NamedTuple

_SHOWN = 4  # names of a side in a message; a net of another width has one for each tensor


class Unmatched(NamedTuple):
    """What does not fit between a net and a state: names, over all stages of a pipeline.

    Attributes:
        missing: Names that are in the net only.
        unexpected: Names that are in the state only.
        mismatched: Names that are in both, with the shapes (in the state, in the net).
        positions: Tables of learned positions that were loaded in part, with their numbers of
            positions (in the state, in the net).
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    positions: dict[str, tuple[int, int]]

    def describe(self) -> str:
        """Return the first names of each side on one line; empty if all fits."""
        return "; ".join([*self._without_counterpart(), *_first(self.unexpected, "there only")])

    def describe_consequences(self) -> str:
        """Return what becomes of each side where what fits is loaded; empty if all fits."""
        initialized = "; ".join(self._without_counterpart())
        unused = "; ".join(_first(self.unexpected, "there only"))
        consequences = {"left as initialized": initialized, "not used": unused}
        return "; ".join(f"{what}: {names}" for what, names in consequences.items() if names)

    def describe_positions(self) -> list[str]:
        """Return a line for each table of positions that was loaded in part."""
        lines = []
        for name, (there, here) in self.positions.items():
            taken = f"{name}: positions 0 to {min(there, here) - 1} are the learned ones"
            rest = f"{there} to {here - 1} are new, left as initialized"
            if there > here:
                rest = f"{here} to {there - 1} are cut off"
            lines.append(f"{taken}, {rest}")
        return lines

    def _without_counterpart(self) -> list[str]:
        shapes = [f"{n} {there} there, {here}" for n, (there, here) in self.mismatched.items()]
        return [*_first(shapes, "here"), *_first(self.missing, "here only")]


def _first(names: Iterable[str], side: str) -> list[str]:
    names = list(names)
    shown = [f"{name} {side}" for name in names[:_SHOWN]]
    return shown + ([f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])
