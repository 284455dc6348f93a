"""Several data sets in given shares, each through epochs of its own.

# N samples, B batch, T positions of a sample
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.core.small_files import DataError
from gptrain.data.hugging_face import as_pairs
from gptrain.data.order import SampleOrder
from gptrain.data.samples import BatchDataset, BatchReader, describe, len_of

_CYCLE = 2**16  # samples after which the choice of parts repeats: shares are exact to 2^-17


class Mixture(BatchDataset):
    """Parts one after another, and the order in which training mixes them.

    Args:
        parts: name -> data set of pairs (tokens (T,), targets (T,)), of the same T.
        weights: name -> share of the samples, relative to the sum of all.
        seq_len: T, to be checked; None: that of the first part.
    Attributes:
        tokenizer, token_bytes: where all parts have the same.
    Raises: DataError for parts whose samples or tokenizers differ.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset],
        weights: Mapping[str, float],
        seq_len: int | None = None,
    ) -> None:
        if not parts:
            raise DataError("a mixture of no parts; try: data@data.parts.<name>=text")
        self.parts = {name: as_pairs(part, f"part {name}") for name, part in parts.items()}
        total = sum(weights.values())
        self.weights = {name: weights[name] / total for name in parts}
        self.firsts = np.cumsum([0, *map(len_of, self.parts.values())])  # (parts + 1,)
        lengths = {name: count_positions(part, name) for name, part in self.parts.items()}
        self.seq_len = seq_len = seq_len or next(iter(lengths.values()))
        tokenizers = {}
        for name, part in self.parts.items():
            if (n_positions := lengths[name]) != seq_len:
                raise DataError(f"part {name}: samples of {n_positions} positions, not {seq_len}")
            if tokenizer := getattr(part, "tokenizer", None):
                tokenizers.setdefault(tokenizer.identity, (name, tokenizer))
        if len(tokenizers) > 1:
            names = " and ".join(name for name, _ in tokenizers.values())
            raise DataError(f"parts {names} have tokenizers of their own; give both the same file")
        self.tokenizer = next((tokenizer for _, tokenizer in tokenizers.values()), None)
        of_parts: list[Any] = [getattr(p, "token_bytes", None) for p in self.parts.values()]
        is_same = all(one is not None and np.array_equal(one, of_parts[0]) for one in of_parts)
        self.token_bytes = of_parts[0] if is_same else None

    @cached_property
    def fingerprint(self) -> str:
        parts = self.parts.items()
        facts = [(name, len_of(part), getattr(part, "fingerprint", None)) for name, part in parts]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch in one call per part: tokens (B, T) and targets (B, T), int64."""
        samples = np.asarray(indices, dtype=np.int64)
        owners = np.searchsorted(self.firsts, samples, side="right") - 1
        batch: Any = None
        for number in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == number)
            name, part = list(self.parts.items())[number]
            reader = BatchReader(part, f"part {name}", self.seq_len)
            of_part = reader.__getitems__((samples[rows] - self.firsts[number]).tolist())
            batch = batch or tuple(one.new_empty(len(samples), one.shape[1]) for one in of_part)
            for whole, own in zip(batch, of_part, strict=True):
                whole[torch.from_numpy(rows)] = own
        return batch

    def order(self, seed: int) -> "MixtureOrder":
        """In which training reads the samples."""
        lengths = {name: len_of(part) for name, part in self.parts.items()}
        return MixtureOrder(lengths, self.weights, seed)

    def about(self, n_samples: int = 0) -> str:
        """What the parts are made of, and how often a run of so many samples sees each."""
        counts = self.order(0).count(n_samples)
        words = []
        for (name, part), count in zip(self.parts.items(), counts.tolist(), strict=True):
            of_part = f"{len_of(part):,} samples · {count / len_of(part):.3g} epochs"
            if about := getattr(part, "about", None):
                of_part = about(count)
            words.append(f"{name} {self.weights[name]:.3g}: {of_part}")
        return " | ".join(words)


def count_positions(part: Dataset, name: str) -> int:
    """Return T of a part's first sample.   Raises: DataError if it is no pair of sequences."""
    sample = part[0]
    if isinstance(sample, tuple | list) and len(sample) == 2:
        lengths = {len(one) for one in sample if isinstance(one, Tensor | np.ndarray) and one.ndim}
        if len(lengths) == 1:
            return lengths.pop()
    needed = "needed: a pair (tokens (T,), targets (T,)), or a dict of input_ids and labels"
    raise DataError(f"part {name}: sample 0 is {describe(sample)}; {needed}")


class MixtureOrder:
    """Which sample stands at each position of a run: a pure function of seed and position.

    The part of a position is the same in every cycle of 2^16: the j-th of n samples of a part
    stands where (j + 1/2) / n of a cycle is due, so that in any window of positions each part has
    its share to within a few samples. A part's own samples follow in permutations of their own.

    Args:
        lengths: name -> samples of a part.   weights: name -> its share, 1 in sum.
    """

    def __init__(self, lengths: Mapping[str, int], weights: Mapping[str, float], seed: int) -> None:
        self.n_samples = sum(lengths.values())
        names = sorted(lengths).index  # the same order whatever stands first
        self._orders = [SampleOrder(n, seed + 1 + names(name)) for name, n in lengths.items()]
        self._firsts = np.cumsum([0, *lengths.values()])
        exact = np.array([weights[name] for name in lengths]) * _CYCLE
        self._counts = np.maximum(1, exact.astype(np.int64))  # (parts,) of a cycle
        missing = _CYCLE - self._counts.sum()  # to those who lost most by rounding
        self._counts[np.argsort(self._counts - exact)[: max(0, missing)]] += 1
        self._counts[np.argmax(self._counts)] += min(0, missing)
        due = [(np.arange(n) + 0.5) / n for n in self._counts]
        owners = np.repeat(np.arange(len(due)), self._counts)
        places = np.argsort(np.concatenate(due), kind="stable")
        self._owners = owners[places]  # (cycle,) the part of each position
        self._ranks = np.concatenate([np.arange(n) for n in self._counts])[places]  # in its part
        self._ahead = np.zeros_like(self._counts)  # of what these weights would have taken so far

    def index(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Samples of the mixture, int64, in the shape of `positions` of an epoch of n_samples."""
        cycles, places = np.divmod(epoch * self.n_samples + np.asarray(positions), _CYCLE)
        owners = self._owners[places]
        numbers = cycles * self._counts[owners] + self._ranks[places] + self._ahead[owners]
        samples = np.empty(owners.shape, dtype=np.int64)
        for part in np.unique(owners).tolist():
            order, is_mine = self._orders[part], owners == part
            epochs, own = np.divmod(numbers[is_mine], order.n_samples)
            found = np.empty_like(own)
            for one in np.unique(epochs).tolist():
                found[epochs == one] = order.index(one, own[epochs == one])
            samples[is_mine] = self._firsts[part] + found
        return samples

    def taken(self, epoch: int, position: int) -> list[int]:
        """Samples that each part has given before a position."""
        return (self.count(epoch * self.n_samples + position) + self._ahead).tolist()

    def go_on(self, epoch: int, position: int, taken: Sequence[int]) -> None:
        """Each part's own epochs go on from there, whatever the weights were before."""
        self._ahead = np.array(taken) - self.count(epoch * self.n_samples + position)

    def count(self, n_samples: int) -> np.ndarray:
        """How many of the first so many positions are of each part, (parts,)."""
        cycles, rest = divmod(n_samples, _CYCLE)
        return cycles * self._counts + np.bincount(self._owners[:rest], minlength=len(self._counts))
