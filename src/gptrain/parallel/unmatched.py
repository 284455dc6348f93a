"""The difference between the tensors of a net and those of a checkpoint."""

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
        shapes = [
            f"{name} {saved} in the checkpoint, {shape} in the net"
            for name, (saved, shape) in self.mismatched.items()
        ]
        missing = [f"{name} only in the net" for name in self.missing]
        unexpected = [f"{name} only in the checkpoint" for name in self.unexpected]
        return "; ".join(text for part in (shapes, missing, unexpected) for text in _shorten(part))

    def describe_positions(self) -> list[str]:
        """Return one line for each table of learned positions that was loaded in part, if any."""
        return [
            f"{name}: {n_saved} positions in the checkpoint, {n_net} in the net; "
            f"{min(n_saved, n_net)} are loaded"
            for name, (n_saved, n_net) in self.positions.items()
        ]


def _shorten(phrases: list[str]) -> list[str]:
    """Return the first `_SHOWN` phrases and, if there are more, `and N more` at the end."""
    n_omitted = len(phrases) - _SHOWN
    return [*phrases[:_SHOWN], f"and {n_omitted} more"] if n_omitted > 0 else phrases
