"""Scaling law: loss as a function of the size of a model and the number of its training tokens.

    L(N, D) = E + A N^-a + B D^-b

N is a number of parameters, D a number of tokens, L the loss in nats per token. Source: Hoffmann et
al. 2022, arXiv:2203.15556, approach 3, with the corrections of Besiroglu et al. 2024,
arXiv:2404.10102. If the runs are too few for five constants, the law is L = A (N D)^-a.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import nn

NAMES = {5: ("E", "A", "a", "B", "b"), 2: ("A", "a")}  # names of a law's constants
COUNTS = {  # meanings of N
    "all": "all parameters",
    "matrices": "parameters without tables that are looked up",
    "blocks": "parameters without embeddings and head",
}
HUBER = 1e-3  # threshold of the Huber loss of log residuals, as in Hoffmann et al.
STEEPEST = 3.0  # largest exponent of a fit; the exponents of published laws are 0.2 to 0.6
N_BOOTSTRAP, LEVEL = 200, 0.95  # number of bootstrap samples, level of the printed interval
# Starting points of a fit, as (E, A term, a, B term, b). E is a fraction of the lowest loss. The
# terms are fractions of the mean loss, and a and b are the exponents.
GRID = ((0.05, 0.4, 0.7, 0.9), (0.05, 0.2, 0.5), (0.1, 0.3, 0.6, 1.0), (0.05, 0.2, 0.5),
        (0.1, 0.3, 0.6, 1.0))  # fmt: skip
N_STARTS = 30  # number of starting points, those with the smallest residuals, that are optimized


def count_parameters(net: nn.Module, vocab_size: int | None = None) -> dict[str, int]:
    """Count all parameters of a net, those outside of embedding tables, and those of its blocks.

    A parameter that several modules share counts once. The net may be on the meta device.

    Args:
        net: The net.
        vocab_size: Number of tokens. A weight outside of embeddings with a side of this size
            counts as a part of the head. None if the number is not known.

    Returns:
        The number of `all` parameters, of those in `matrices` (outside of embedding tables), and of
        those in `blocks` (outside of embeddings and head).
    """
    in_embeddings, in_layers = set(), set()
    for module in net.modules():
        group = in_embeddings if isinstance(module, nn.Embedding) else in_layers
        group.update(module.parameters(recurse=False))
    head = {parameter for parameter in in_layers if vocab_size in parameter.shape}
    groups = {
        "all": in_embeddings | in_layers,
        "matrices": in_layers,
        "blocks": in_layers - in_embeddings - head,
    }
    return {name: sum(parameter.numel() for parameter in group) for name, group in groups.items()}


def law_loss(constants: ArrayLike, n: Any, d: Any) -> Any:
    """Return the loss L(N, D) of a law, E + A N^-a + B D^-b or A (N D)^-a.

    Args:
        constants: Constants (E, A, a, B, b) or (A, a), shape (..., 5) or (..., 2).
        n: Number of parameters, N. A number or an array.
        d: Number of tokens, D. A number or an array.
    """
    parts = np.moveaxis(np.asarray(constants), -1, 0)
    if len(parts) == 2:
        return parts[0] * (n * d) ** -parts[1]
    return parts[0] + parts[1] * n ** -parts[2] + parts[3] * d ** -parts[4]


@dataclass(frozen=True)
class Law:
    """A scaling law that was fitted to runs.

    The law is L(N, D) = E + A N^-a + B D^-b for K = 5 constants, or L = A (N D)^-a for K = 2.

    Attributes:
        count: Parameters that N counts: `all`, `matrices` (those outside of embedding tables) or
            `blocks` (those outside of embeddings and head).
        constants: The K constants of the law: E, A, a, B, b, or A, a.
        samples: Constants of each bootstrap sample, shape (S, K).
        noise: Log residuals of single runs, one for each bootstrap sample, shape (S,).
    """

    count: str
    constants: Sequence[float]
    samples: Sequence[Sequence[float]]
    noise: Sequence[float]

    def loss(self, n: float, d: float) -> float:
        """Return the predicted loss of a model of n parameters after d tokens, in nats per token.

        Args:
            n: Number of parameters, counted as `count` says.
            d: Number of training tokens.
        """
        return float(law_loss(self.constants, n, d))

    def interval(self, n: float, d: float) -> tuple[float, float]:
        """Return the interval (low, high) in which the loss of a run lies with 95 % probability.

        The interval contains the uncertainty of the constants and the noise of a single run.

        Args:
            n: Number of parameters, counted as `count` says.
            d: Number of training tokens.
        """
        losses = law_loss(self.samples, n, d) * np.exp(self.noise)
        low, high = np.quantile(losses, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    @property
    def named(self) -> dict[str, float]:
        """Constants of the law by name."""
        return dict(zip(NAMES[len(self.constants)], self.constants, strict=True))


def count_constants(n: Any, d: Any) -> int:
    """Return how many constants of a scaling law these runs can determine, 5 or 2.

    Five constants need at least seven different runs of three sizes, with several lengths for at
    least two of these sizes.

    Args:
        n: Number of parameters of each run, shape (P,).
        d: Number of tokens of each run, shape (P,).
    """
    points = set(zip(np.round(n).tolist(), np.round(d).tolist(), strict=True))
    sizes = [size for size, _ in points]
    n_varied = sum(sizes.count(size) > 1 for size in set(sizes))
    return 5 if len(points) > 6 and len(set(sizes)) >= 3 and n_varied >= 2 else 2


def fit(n: Any, d: Any, loss: Any, start: np.ndarray | None = None) -> np.ndarray:
    """Fit the constants of the scaling law to runs.

    If `count_constants(n, d)` is 5, the constants minimize the Huber loss of the log residuals,
    with exponents from 0 to 3. If it is 2, they minimize the squared log residuals.

    Args:
        n: Number of parameters of each run, shape (P,).
        d: Number of tokens of each run, shape (P,).
        loss: Loss of each run, shape (P,).
        start: Five constants at which the search for five constants begins, for example those of a
            fit to nearly the same runs. None tries the best points of a grid. Ignored for two
            constants.

    Returns:
        The constants E, A, a, B, b, shape (5,), or A, a, shape (2,).
    """
    from scipy.optimize import least_squares

    log_n, log_d, log_loss = np.log(n), np.log(d), np.log(loss)
    if count_constants(n, d) == 2:
        slope, intercept = np.polyfit(log_n + log_d, log_loss, 1)
        return np.array([np.exp(intercept), -slope])
    # Centre the data, so that an exponent and its factor are nearly independent.
    mean_n, mean_d = log_n.mean(), log_d.mean()
    x, y = log_n - mean_n, log_d - mean_d
    lowest, mean_loss = log_loss.min(), log_loss.mean()

    def residuals(point: Any) -> np.ndarray:
        log_e, log_a, a, log_b, b = point
        terms = [np.full_like(x, log_e), log_a - a * x, log_b - b * y]
        return np.logaddexp.reduce(terms) - log_loss

    if start is None:
        grid = [
            (lowest + np.log(e), mean_loss + np.log(n_term), a, mean_loss + np.log(d_term), b)
            for e, n_term, a, d_term, b in product(*GRID)
        ]
        starts = sorted(grid, key=lambda point: np.abs(residuals(point)).sum())[:N_STARTS]
    else:
        e, n_factor, a, d_factor, b = start
        log_a = np.log(n_factor) - a * mean_n
        log_b = np.log(d_factor) - b * mean_d
        starts = [(np.log(e), log_a, a, log_b, b)]
    # E is at most the lowest loss. Below a thousandth of the lowest loss E has no effect, and the
    # fit has no gradient with respect to log E.
    low = (lowest + np.log(1e-3), -np.inf, 0, -np.inf, 0)
    high = (lowest + 1e-9, np.inf, STEEPEST, np.inf, STEEPEST)
    options = {"bounds": (low, high), "loss": "huber", "f_scale": HUBER, "xtol": 1e-10}
    fits = [least_squares(residuals, np.clip(point, low, high), **options) for point in starts]
    log_e, log_a, a, log_b, b = min(fits, key=lambda result: result.cost).x
    return np.array([np.exp(log_e), np.exp(log_a + a * mean_n), a, np.exp(log_b + b * mean_d), b])


def fit_law(count: str, n: Any, d: Any, loss: Any) -> Law:
    """Fit a scaling law to runs, and draw the bootstrap samples for its confidence interval.

    A bootstrap sample is a fit to runs that are drawn with replacement. The samples are the same in
    each call with the same runs. There are 200 of them, so that a call takes seconds. The product
    n * d must not be equal in all runs: then no sample can be drawn, and the call never ends.

    Args:
        count: Parameters that N counts: `all`, `matrices` or `blocks` (see `Law`).
        n: Number of parameters of each run, shape (P,).
        d: Number of tokens of each run, shape (P,).
        loss: Loss of each run, shape (P,).

    Returns:
        The law, with five constants or, if the runs are too few, with two.
    """
    n, d, loss = (np.asarray(values, dtype=float) for values in (n, d, loss))
    constants = fit(n, d, loss)
    rng = np.random.default_rng(0)
    samples = []
    while len(samples) < N_BOOTSTRAP:
        drawn = rng.integers(len(loss), size=len(loss))
        is_enough = count_constants(n[drawn], d[drawn]) == len(constants)
        if is_enough and np.ptp((n * d)[drawn]):
            samples.append(fit(n[drawn], d[drawn], loss[drawn], constants).tolist())
    # Residuals of a fit are smaller than the noise: correct for the degrees of freedom.
    correction = np.sqrt(len(loss) / max(1, len(loss) - len(constants)))
    residuals = correction * np.log(loss / law_loss(constants, n, d))
    noise = rng.choice(residuals, N_BOOTSTRAP)
    return Law(count, constants.tolist(), samples, noise.tolist())


def predict_largest(n: Any, d: Any, loss: Any) -> dict[str, float]:
    """Fit a law to all sizes but the largest, and compare its prediction with the largest.

    Args:
        n: Number of parameters of each run, shape (P,).
        d: Number of tokens of each run, shape (P,).
        loss: Loss of each run, shape (P,).

    Returns:
        A dict of `predicted` (predicted loss of the longest runs of the largest size), `measured`
        (mean loss of these runs), `error` (mean absolute log residual of all runs of the largest
        size) and `constants` (number of constants of the fitted law).
    """
    n, d, loss = (np.asarray(values, dtype=float) for values in (n, d, loss))
    is_smaller = n < n.max()
    is_longest = (n == n.max()) & (d == d.max())
    constants = fit(n[is_smaller], d[is_smaller], loss[is_smaller])
    error = np.abs(np.log(law_loss(constants, n, d) / loss))[~is_smaller].mean()
    predicted = law_loss(constants, n[is_longest], d[is_longest]).mean()
    return {
        "predicted": float(predicted),
        "measured": float(loss[is_longest].mean()),
        "error": float(error),
        "constants": len(constants),
    }


def find_best_size(
    law: Law, flops: float, n: Sequence[float], flops_per_token: Sequence[float]
) -> tuple[float, float]:
    """Return the N and D with the lowest predicted loss for a budget of FLOPs.

    The FLOPs per token of other sizes are interpolated linearly in logarithms. Beyond the known
    sizes they are proportional to N. The search begins at 1/148 (e^-5) of the smallest model.

    Args:
        law: The scaling law, whose `count` is the meaning of N.
        flops: Budget, in FLOPs.
        n: N of known models, in ascending order.
        flops_per_token: FLOPs per token of these models.

    Returns:
        The number of parameters N and the number of training tokens D.
    """
    log_n = np.log(n)
    grid = np.linspace(log_n[0] - 5, np.log(flops), 10_000)  # logarithms of N
    beyond = np.minimum(grid - log_n[0], 0) + np.maximum(grid - log_n[-1], 0)
    log_flops_per_token = np.interp(grid, log_n, np.log(flops_per_token)) + beyond
    tokens = np.exp(np.log(flops) - log_flops_per_token)
    best = int(np.argmin(law_loss(law.constants, np.exp(grid), tokens)))
    return float(np.exp(grid[best])), float(tokens[best])
