"""Predict the loss of a large model from small runs: L(N, D) = E + A N^-a + B D^-b.

    python -m recipes.ladder outputs/ladder experiment=quickstart

Trains each net of SIZES on each of its numbers of tokens, fits the scaling law to the losses, and
prints what it predicts for TARGET. A run that is finished is not trained again, and one that was
interrupted is resumed. Edit the table and the constants; the words that are typed belong to all
runs. N is the number of parameters, D the number of tokens, L the loss in nats per token.

Source: Hoffmann et al. 2022, arXiv:2203.15556, approach 3. The package scipy is needed.
"""

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

import gptrain

NET = "model.d_model={} model.n_heads={} model.n_kv_heads={} model.d_ff={} model.n_layers={}"
# Words of a net and the tokens of its runs: here about 10, 20 and 40 tokens per parameter. The
# learning rate falls with the square root of the width.
SIZES = {
    NET.format(16, 2, 2, 43, 1) + " optimizer.lr=0.028": (1.1e5, 2.2e5, 4.4e5),
    NET.format(24, 2, 2, 64, 1) + " optimizer.lr=0.023": (1.9e5, 3.8e5, 7.6e5),
    NET.format(32, 2, 2, 88, 1) + " optimizer.lr=0.02": (2.9e5, 5.8e5, 11.6e5),
    NET.format(48, 3, 3, 128, 2) + " optimizer.lr=0.016": (8e5, 16e5, 32e5),
    NET.format(64, 4, 4, 176, 3) + " optimizer.lr=0.014": (18.4e5, 36.8e5, 73.6e5),
}
# What a run has besides its size: the length is set by the tokens, and lr decays at its end.
ALWAYS = ["trainer.max_steps=-1", "scheduler=warmup_stable_decay", "ckpt_path=last"]
TARGET = (857_472, 7.5e6)  # N and D of quickstart's net, whose loss is predicted
HUBER = 1e-3  # log residual from which on a run counts less, as in Hoffmann et al.
N_SAMPLES = 200  # bootstrap samples of the interval

Array = NDArray[np.float64]


def train(folder: Path, words: list[str], tokens: float) -> tuple[float, float, float]:
    """Train a run if it is missing, and return its N, D and validation loss."""
    if not (folder / "result.json").exists():
        gptrain.fit([*words, *ALWAYS, f"max_tokens={tokens:.0f}", f"run_dir={folder}"])
    result = json.loads((folder / "result.json").read_text())
    n = sum(parameter.numel() for parameter in gptrain.load(folder).parameters())
    return n, result["tokens"], result["metrics"]["val/loss"]


def law(constants: Array, n: Array | float, d: Array | float) -> Array:
    """Return the loss L(N, D) for the constants (E, A, a, B, b)."""
    e, n_factor, a, d_factor, b = constants
    return e + n_factor * n**-a + d_factor * d**-b


def fit(n: Array, d: Array, loss: Array, start: Array | None = None) -> Array:
    """Return the constants (E, A, a, B, b) with the smallest Huber loss of the log residuals.

    Args:
        n: Number of parameters of each run, (P,).
        d: Number of tokens of each run, (P,).
        loss: Loss of each run, (P,).
        start: Constants at which the search begins. None tries a grid.
    """
    # The terms of a run of mean size and length are independent of the exponents.
    mean_n, mean_d = np.exp(np.log(n).mean()), np.exp(np.log(d).mean())

    def constants(point: Array) -> Array:
        e, n_term, a, d_term, b = point
        return np.array([e, n_term * mean_n**a, a, d_term * mean_d**b, b])

    def residuals(point: Array) -> Array:
        return np.log(law(constants(point), n, d) / loss)

    if start is None:
        grid = product((0.2, 0.5, 0.8), (0.05, 0.3), (0.2, 0.5), (0.05, 0.3), (0.2, 0.5))
        starts = [
            (e * loss.min(), x * loss.mean(), a, y * loss.mean(), b) for e, x, a, y, b in grid
        ]
    else:
        e, n_factor, a, d_factor, b = start
        starts = [(e, n_factor * mean_n**-a, a, d_factor * mean_d**-b, b)]
    high = np.array([loss.min(), np.inf, 3, np.inf, 3])
    fits = [
        least_squares(
            residuals, np.clip(point, 1e-9, high - 1e-9), bounds=(0, high), loss="huber",
            f_scale=HUBER, x_scale="jac", ftol=1e-14, xtol=1e-14, gtol=1e-14,
        )
        for point in starts
    ]  # fmt: skip
    return constants(min(fits, key=lambda result: result.cost).x)


def interval(n: Array, d: Array, loss: Array, best: Array) -> tuple[float, float]:
    """Return the interval of the loss of one run of TARGET, with 95 % of bootstrap samples.

    It has the uncertainty of the constants and the noise of a run.
    """
    rng = np.random.default_rng(0)
    # The residuals of a fit are smaller than the noise: correct for the degrees of freedom.
    correction = np.sqrt(len(loss) / max(1, len(loss) - len(best)))
    noise = correction * np.log(loss / law(best, n, d))
    losses = []
    for _ in range(N_SAMPLES):
        drawn = rng.integers(len(loss), size=len(loss))
        sample = fit(n[drawn], d[drawn], loss[drawn], best)
        losses.append(law(sample, *TARGET) * np.exp(rng.choice(noise)))
    low, high = np.quantile(losses, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    """Train what is missing, fit, and print the table, the check and the prediction."""
    folder, typed = Path(sys.argv[1]), sys.argv[2:]
    points = [
        train(folder / f"{number}-{tokens:.0f}", [*typed, *size.split()], tokens)
        for number, (size, lengths) in enumerate(SIZES.items())
        for tokens in lengths
    ]
    n, d, loss = np.array(points).T
    best = fit(n, d, loss)
    print("    parameters         tokens  val/loss  law")
    for size, tokens, measured, predicted in zip(n, d, loss, law(best, n, d), strict=True):
        print(f"{size:14,.0f} {tokens:14,.0f} {measured:9.4f}  {predicted / measured - 1:+.2%}")
    is_large = n == n.max()
    smaller = fit(n[~is_large], d[~is_large], loss[~is_large])
    off = np.abs(law(smaller, n, d) / loss - 1)[is_large].mean()
    print(f"check     the largest net, predicted from the others: {off:.2%} off")
    e, n_factor, a, d_factor, b = best
    print(f"law       L = {e:.4g} + {n_factor:.4g} N^-{a:.3g} + {d_factor:.4g} D^-{b:.3g}")
    low, high = interval(n, d, loss, best)
    print(f"target    val/loss {law(best, *TARGET):.4f} (95 %: {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
