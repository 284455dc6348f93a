"""How the loss falls with the size of a net and its tokens: L(N, D) = E + A N^-a + B D^-b.

Hoffmann et al. 2022, arXiv:2203.15556, approach 3, with the corrections of Besiroglu et al. 2024,
arXiv:2404.10102. Where the runs are too few for five constants: L = A (N D)^-a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

NAMES = {5: ("E", "A", "a", "B", "b"), 2: ("A", "a")}  # of a law's constants
COUNTS = {  # what N may count
    "all": "all parameters",
    "matrices": "parameters without tables that are looked up",
    "blocks": "parameters without embeddings and head",
}
HUBER = 1e-3  # of log residuals, as Hoffmann et al.
STEEPEST = 3.0  # exponent; those of published laws are 0.2 to 0.6
N_BOOTSTRAP, LEVEL = 200, 0.95
# Where searches begin: E as a part of the lowest loss; the two terms as parts of the mean loss.
GRID = ((0.05, 0.4, 0.7, 0.9), (0.05, 0.2, 0.5), (0.1, 0.3, 0.6, 1.0), (0.05, 0.2, 0.5),
        (0.1, 0.3, 0.6, 1.0))  # fmt: skip
N_STARTS = 30  # the best of these


def count_parameters(net: nn.Module, vocab_size: int | None = None) -> dict[str, int]:
    """N as each of COUNTS has it, each parameter once; the net may be on the meta device."""
    tables, elsewhere = set(), set()
    for module in net.modules():
        found = tables if isinstance(module, nn.Embedding) else elsewhere
        found.update(module.parameters(recurse=False))
    of_vocabulary = {one for one in elsewhere if vocab_size in one.shape}
    parts = (tables | elsewhere, elsewhere, elsewhere - tables - of_vocabulary)
    numbers = (sum(one.numel() for one in part) for part in parts)
    return dict(zip(COUNTS, numbers, strict=True))


def law_loss(constants: ArrayLike, n: Any, d: Any) -> Any:
    """L(N, D) of constants (..., 5) or (..., 2), in the order of NAMES."""
    parts = np.moveaxis(np.asarray(constants), -1, 0)
    if len(parts) == 2:
        return parts[0] * (n * d) ** -parts[1]
    return parts[0] + parts[1] * n ** -parts[2] + parts[3] * d ** -parts[4]


@dataclass(frozen=True)
class Law:
    """The law of some runs.

    Attributes:
        count: of COUNTS: which N.   constants: in the order of NAMES.
        samples: (S, K), those of the bootstrap.
        noise: (S,), log residuals: what a single run adds.
    """

    count: str
    constants: Sequence[float]
    samples: Sequence[Sequence[float]]
    noise: Sequence[float]

    def loss(self, n: float, d: float) -> float:
        """Of a net of n parameters after d tokens."""
        return float(law_loss(self.constants, n, d))

    def interval(self, n: float, d: float) -> tuple[float, float]:
        """In which LEVEL of single runs are to end."""
        found = law_loss(self.samples, n, d) * np.exp(self.noise)
        low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    @property
    def named(self) -> dict[str, float]:
        return dict(zip(NAMES[len(self.constants)], self.constants, strict=True))


def enough(n: Any, d: Any) -> int:
    """How many constants runs determine: 5 of three sizes, two of them at several D; else 2."""
    points = set(zip(np.round(n).tolist(), np.round(d).tolist(), strict=True))
    sizes = [one for one, _ in points]
    is_varied = sum(sizes.count(one) > 1 for one in set(sizes)) >= 2
    return 5 if len(points) > 6 and len(set(sizes)) >= 3 and is_varied else 2


def fit(n: Any, d: Any, loss: Any, near: np.ndarray | None = None) -> np.ndarray:
    """The constants of least Huber loss of the log residuals.

    Args:
        n, d, loss: (P,), of each run.   near: constants to begin at; None: many.
    """
    from scipy.optimize import least_squares

    x, y, z = np.log(n), np.log(d), np.log(loss)
    if enough(n, d) == 2:
        slope, start = np.polyfit(x + y, z, 1)
        return np.array([np.exp(start), -slope])
    x_mean, y_mean, lowest, middle = x.mean(), y.mean(), z.min(), z.mean()
    x, y = x - x_mean, y - y_mean  # so that an exponent and its factor do not move together

    def residuals(p: Any) -> np.ndarray:
        e, a, s, b, t = p  # logarithms of E, A, B, and the two exponents
        return np.logaddexp.reduce([np.full_like(x, e), a - s * x, b - t * y]) - z

    if near is None:
        logs = ((lowest + np.log(e), middle + np.log(a), s, middle + np.log(b), t)
                for e, a, s, b, t in product(*GRID))  # fmt: skip
        starts = sorted(logs, key=lambda p: np.abs(residuals(p)).sum())[:N_STARTS]
    else:
        e, a, s, b, t = near
        starts = [(np.log(e), np.log(a) - s * x_mean, s, np.log(b) - t * y_mean, t)]
    # E is at most the lowest loss; below a thousandth of that it is nothing, and so is its slope.
    low = (lowest + np.log(1e-3), -np.inf, 0, -np.inf, 0)
    high = (lowest + 1e-9, np.inf, STEEPEST, np.inf, STEEPEST)
    how = {"bounds": (low, high), "loss": "huber", "f_scale": HUBER, "xtol": 1e-10}
    found = [least_squares(residuals, np.clip(start, low, high), **how) for start in starts]
    e, a, s, b, t = min(found, key=lambda one: one.cost).x
    return np.array([np.exp(e), np.exp(a + s * x_mean), s, np.exp(b + t * y_mean), t])


def fit_law(count: str, n: Any, d: Any, loss: Any) -> Law:
    """The law of runs, with the interval that a bootstrap over them gives."""
    n, d, loss = (np.asarray(one, dtype=float) for one in (n, d, loss))
    constants, rng, samples = fit(n, d, loss), np.random.default_rng(0), []
    while len(samples) < N_BOOTSTRAP:
        drawn = rng.integers(len(loss), size=len(loss))
        if enough(n[drawn], d[drawn]) == len(constants) and np.ptp((n * d)[drawn]):
            samples.append(fit(n[drawn], d[drawn], loss[drawn], constants).tolist())
    # A fit takes up some of the residuals that it is measured by.
    left = np.sqrt(len(loss) / max(1, len(loss) - len(constants)))
    noise = rng.choice(left * np.log(loss / law_loss(constants, n, d)), N_BOOTSTRAP)
    return Law(count, constants.tolist(), samples, noise.tolist())


def left_out(n: Any, d: Any, loss: Any) -> dict[str, float]:
    """What the law of the other sizes says of the largest; error: mean of the log residuals."""
    n, d, loss = (np.asarray(one, dtype=float) for one in (n, d, loss))
    known, last = n < n.max(), (n == n.max()) & (d == d.max())
    constants = fit(n[known], d[known], loss[known])
    off = np.abs(np.log(law_loss(constants, n, d) / loss))[~known].mean()
    said = law_loss(constants, n[last], d[last]).mean()
    facts = {"predicted": said, "measured": loss[last].mean(), "error": off}
    return {key: float(value) for key, value in facts.items()} | {"constants": len(constants)}


def best_for(
    law: Law, flops: float, n: Sequence[float], per_token: Sequence[float]
) -> tuple[float, float]:
    """N and D of the lowest loss that so many FLOPs reach.

    Args:
        n, per_token: N and FLOPs of a token of nets that are known, rising; between and beyond them
            by straight lines over logarithms, of slope 1 beyond.
    """
    x, y = np.log(n), np.log(per_token)
    grid = np.linspace(x[0] - 5, np.log(flops), 10_000)
    beyond = np.minimum(grid - x[0], 0) + np.maximum(grid - x[-1], 0)
    tokens = np.exp(np.log(flops) - np.interp(grid, x, y) - beyond)
    best = int(np.argmin(law_loss(law.constants, np.exp(grid), tokens)))
    return float(np.exp(grid[best])), float(tokens[best])
