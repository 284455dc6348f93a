"""The difference between the tensors of a net and those of a checkpoint."""

from collections.abc import Iterable
from typing import NamedTuple

# Largest number of names of each kind in a message. A net of another width differs in every tensor.
_SHOWN = 4


class Unmatched(NamedTuple):
    """Names of the tensors that differ between a net and a checkpoint, over all pipeline stages.

    Attributes:
        missing: Names that are only in the net.
        unexpected: Names that are only in the checkpoint.
        mismatched: Name -> (shape in the checkpoint, shape in the net), if the shapes differ.
        positions: Name of a partly loaded table of learned positions -> (number of positions in the
            checkpoint, number of positions in the net).
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    positions: dict[str, tuple[int, int]]

    def describe(self) -> str:
        """Return one line with the first names of each kind, or "" if everything matches.

        Tables of positions that were loaded in part are not in it: see `describe_positions`.
        """
        return "; ".join([*self._initialized(), *self._unused()])

    def describe_consequences(self) -> str:
        """Return one line about the tensors that keep their initial values or are not used.

        The line is "" if everything matches. Tables of positions that were loaded in part are not
        in it: see `describe_positions`.
        """
        initialized = "; ".join(self._initialized())
        unused = "; ".join(self._unused())
        consequences = {"left as initialized": initialized, "not used": unused}
        return "; ".join(f"{label}: {names}" for label, names in consequences.items() if names)

    def describe_positions(self) -> list[str]:
        """Return one line for each table of learned positions that was loaded in part, if any."""
        lines = []
        for name, (n_saved, n_net) in self.positions.items():
            loaded = f"{name}: positions 0 to {min(n_saved, n_net) - 1} are loaded"
            rest = f"{n_saved} to {n_net - 1} are new, left as initialized"
            if n_saved > n_net:
                rest = f"{n_net} to {n_saved - 1} are cut off"
            lines.append(f"{loaded}, {rest}")
        return lines

    def _initialized(self) -> list[str]:
        """Return phrases for the tensors of the net that keep their initial values.

        There is one phrase for each tensor for which the checkpoint has no tensor of the same name,
        or one of another shape. After `_SHOWN` phrases of each kind the number of further tensors
        follows.
        """
        shapes = [
            f"{name} {saved} in the checkpoint, {shape} in the net"
            for name, (saved, shape) in self.mismatched.items()
        ]
        return [*_shorten(shapes), *_shorten(f"{name} only in the net" for name in self.missing)]

    def _unused(self) -> list[str]:
        """Return phrases such as "head.bias only in the checkpoint" for tensors that are not used.

        There is one phrase for each tensor that the net does not have. After `_SHOWN` phrases the
        number of further tensors follows.
        """
        return _shorten(f"{name} only in the checkpoint" for name in self.unexpected)


def _shorten(phrases: Iterable[str]) -> list[str]:
    """Return the first `_SHOWN` phrases and, if there are more, `and N more` at the end."""
    phrases = list(phrases)
    n_omitted = len(phrases) - _SHOWN
    if n_omitted <= 0:
        return phrases
    return [*phrases[:_SHOWN], f"and {n_omitted} more"]
