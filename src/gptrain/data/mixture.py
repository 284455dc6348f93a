"""Mixture: a dataset that mixes the samples of several datasets, its parts, in given shares.

Each part goes through its own epochs.

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

from gptrain.core.errors import DataError
from gptrain.data.hugging_face import as_pairs
from gptrain.data.order import SampleOrder
from gptrain.data.samples import (
    BatchDataset,
    BatchReader,
    describe_sample,
    has_documents,
    len_of,
)

# Number of positions after which the choice of parts repeats. The actual share of a part differs
# from its weight by less than 2^-16, unless a weight is below 2^-16: each part has at least one
# position of a cycle.
_CYCLE = 2**16


class Mixture(BatchDataset):
    """Dataset that concatenates several datasets, the parts, for a training that mixes them.

    Index i is sample i of the concatenation. `order` returns the order in which training mixes the
    samples of the parts. An evaluation reads the parts separately.

    Args:
        parts: Dataset of each part by name. Samples are pairs (tokens (T,), targets (T,)) or dicts
            of Hugging Face, with the same T in all parts. Samples of some parts may have a third
            item, the index of each token's document. A sample of the other parts then counts as one
            document.
        weights: Share of the samples of each part by name, relative to the sum of all weights.
        seq_len: Number of positions T that every part must have. None takes the T of the first
            part.

    Attributes:
        has_documents: Whether samples have a third item, the index of each token's document.
        firsts: Index of the first sample of each part, followed by the number of all samples,
            (parts + 1,).
        tokenizer: Tokenizer of the parts that have a tokenizer. None if no part has a tokenizer.
        token_bytes: Bytes of text per token, (V,), if all parts have the same values. None
            otherwise.
        end_id: Id of the token that ends a document, if it is the same in all parts. None
            otherwise.

    Raises:
        DataError: If there is no part, if the first sample of a part has another form or not
            `seq_len` positions, or if two parts have different tokenizers.
        KeyError: If a part has no weight.
        IndexError: If a part is empty, or the error that its dataset raises for sample 0.
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
        self.seq_len = seq_len or next(iter(lengths.values()))
        for name, n_positions in lengths.items():
            if n_positions != self.seq_len:
                message = f"samples of {n_positions} positions, not {self.seq_len}"
                raise DataError(f"part {name}: {message}")
        self.has_documents = any(has_documents(part[0]) for part in self.parts.values())
        self.tokenizer = self._find_tokenizer()
        tables: list[Any] = [getattr(part, "token_bytes", None) for part in self.parts.values()]
        is_same = all(table is not None and np.array_equal(table, tables[0]) for table in tables)
        self.token_bytes = tables[0] if is_same else None
        ends = {getattr(part, "end_id", None) for part in self.parts.values()}
        self.end_id = ends.pop() if len(ends) == 1 else None

    def _find_tokenizer(self) -> Any:
        """Return the tokenizer that all parts with a tokenizer share, or None.

        Raises:
            DataError: If two parts have different tokenizers.
        """
        tokenizers: dict[str, tuple[str, Any]] = {}  # identity -> (part, tokenizer)
        for name, part in self.parts.items():
            if tokenizer := getattr(part, "tokenizer", None):
                tokenizers.setdefault(tokenizer.identity, (name, tokenizer))
        if len(tokenizers) > 1:
            names = " and ".join(name for name, _ in tokenizers.values())
            raise DataError(f"parts {names} have different tokenizers; give both the same file")
        return next((tokenizer for _, tokenizer in tokenizers.values()), None)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the name, the number of samples and the fingerprint of each part."""
        parts = self.parts.items()
        facts = [(name, len_of(part), getattr(part, "fingerprint", None)) for name, part in parts]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens (B, T) and targets (B, T), int64, in the order of the indices.

        The samples of one part are read together, with one call if the part has `__getitems__`.

        Args:
            indices: Indices of samples in the concatenation of the parts, (B,).

        Returns:
            Tokens (B, T) and targets (B, T), int64. With `has_documents` also the index of the
            document of each token, (B, T).

        Raises:
            DataError: If the samples of a part cannot be stacked or do not have T positions.
        """
        samples = np.asarray(indices, dtype=np.int64)
        owners = np.searchsorted(self.firsts, samples, side="right") - 1
        batch: Any = None
        for number in np.unique(owners).tolist():
            rows = np.flatnonzero(owners == number)
            name, part = list(self.parts.items())[number]
            reader = BatchReader(part, f"part {name}", self.seq_len)
            part_batch = reader.__getitems__((samples[rows] - self.firsts[number]).tolist())
            if self.has_documents and len(part_batch) == 2:
                part_batch = (*part_batch, torch.zeros_like(part_batch[0]))
            if batch is None:
                batch = tuple(t.new_empty(len(samples), t.shape[1]) for t in part_batch)
            for target, source in zip(batch, part_batch, strict=True):
                target[torch.from_numpy(rows)] = source
        return batch

    def order(self, seed: int) -> "MixtureOrder":
        """Return the order in which training reads the samples.

        Args:
            seed: Seed of the permutations of the parts.
        """
        lengths = {name: len_of(part) for name, part in self.parts.items()}
        return MixtureOrder(lengths, self.weights, seed)

    def describe(self, n_samples: int = 0) -> str:
        """Return the weight, the content and the number of epochs of each part, as one line.

        Args:
            n_samples: Number of samples of the mixture that the run reads, from which the epochs
                follow. With 0, parts of text leave out their epochs.
        """
        counts = self.order(0).count_by_part(n_samples)
        words = []
        for (name, part), count in zip(self.parts.items(), counts.tolist(), strict=True):
            text = f"{len_of(part):,} samples · {count / len_of(part):.3g} epochs"
            if describe := getattr(part, "describe", None):
                text = describe(count)
            words.append(f"{name} {self.weights[name]:.3g}: {text}")
        return " | ".join(words)


def count_positions(part: Dataset, name: str) -> int:
    """Return the number of positions T of the first sample of a part.

    Args:
        part: Dataset of pairs.
        name: Name of the part, for the error message.

    Raises:
        DataError: If the sample is not a pair of sequences of equal length, which may be followed
            by the index of each token's document.
        IndexError: If the part is empty, or the error that its dataset raises for sample 0.
    """
    sample = part[0]
    if isinstance(sample, tuple | list) and (len(sample) == 2 or has_documents(sample)):
        arrays = [item for item in sample if isinstance(item, Tensor | np.ndarray) and item.ndim]
        lengths = {len(array) for array in arrays}
        if len(lengths) == 1:
            return lengths.pop()
    needed = "needed: a pair (tokens (T,), targets (T,)), or a dict of input_ids and labels"
    raise DataError(f"part {name}: sample 0 is {describe_sample(sample)}; {needed}")


class MixtureOrder:
    """Order in which training reads the samples of a mixture.

    It is a pure function of seed and position, so that a resumed run continues with the next
    sample.

    Each position belongs to a part, and this division repeats in cycles of 2^16 positions. If a
    part has n positions of a cycle, the j-th of them is at the fraction (j + 1/2) / n of the cycle,
    with j from 0, as far as positions of other parts leave space. In any window of positions, each
    part therefore has its share to within a few samples. The samples of a part follow the part's
    own permutations, one after another.

    Args:
        lengths: Number of samples of each part by name.
        weights: Share of each part by name. The sum is 1.
        seed: Seed of the permutations.
    """

    def __init__(self, lengths: Mapping[str, int], weights: Mapping[str, float], seed: int) -> None:
        self.n_samples = sum(lengths.values())
        # The seed of a part depends on its name, not on the order of the parts in the config.
        number_of = sorted(lengths).index
        self._orders = [SampleOrder(n, seed + 1 + number_of(name)) for name, n in lengths.items()]
        self._firsts = np.cumsum([0, *lengths.values()])
        exact = np.array([weights[name] for name in lengths]) * _CYCLE
        self._counts = np.maximum(1, exact.astype(np.int64))  # (parts,) positions of a cycle
        # The positions that rounding down has lost go to the parts that lost most.
        missing = _CYCLE - self._counts.sum()
        self._counts[np.argsort(self._counts - exact)[: max(0, missing)]] += 1
        self._counts[np.argmax(self._counts)] += min(0, missing)
        due = [(np.arange(n) + 0.5) / n for n in self._counts]
        owners = np.repeat(np.arange(len(due)), self._counts)
        by_due = np.argsort(np.concatenate(due), kind="stable")
        self._owners = owners[by_due]  # (cycle,) part of each position
        # (cycle,) number of each position among the positions of its part
        self._ranks = np.concatenate([np.arange(n) for n in self._counts])[by_due]
        # (parts,) samples that each part has given in addition to those by the current weights
        self._ahead = np.zeros_like(self._counts)

    def index(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the sample of the mixture at each position of an epoch, int64, in the same shape.

        Args:
            epoch: Number of the epoch, from 0. An epoch has as many positions as the mixture has
                samples, but does not contain each sample once.
            positions: Positions in the epoch.
        """
        cycles, places = np.divmod(epoch * self.n_samples + np.asarray(positions), _CYCLE)
        owners = self._owners[places]
        numbers = cycles * self._counts[owners] + self._ranks[places] + self._ahead[owners]
        samples = np.empty(owners.shape, dtype=np.int64)
        for part in np.unique(owners).tolist():
            order = self._orders[part]
            is_of_part = owners == part
            part_epochs, part_positions = np.divmod(numbers[is_of_part], order.n_samples)
            part_samples = np.empty_like(part_positions)
            for part_epoch in np.unique(part_epochs).tolist():
                is_of_epoch = part_epochs == part_epoch
                part_samples[is_of_epoch] = order.index(part_epoch, part_positions[is_of_epoch])
            samples[is_of_part] = self._firsts[part] + part_samples
        return samples

    def count_taken(self, epoch: int, position: int) -> list[int]:
        """Return how many samples each part has given before a position of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            position: Position in the epoch.
        """
        return (self.count_by_part(epoch * self.n_samples + position) + self._ahead).tolist()

    def resume(self, epoch: int, position: int, taken: Sequence[int]) -> None:
        """Make each part continue after the samples that it has given, when a run resumes.

        This matters if the weights have changed: then the position alone does not determine how
        many samples each part has given.

        Args:
            epoch: Number of the epoch at which the run resumes.
            position: Position in this epoch.
            taken: Samples that each part has given so far, as `count_taken` returned them.
        """
        self._ahead = np.array(taken) - self.count_by_part(epoch * self.n_samples + position)

    def count_by_part(self, n_samples: int) -> np.ndarray:
        """Return how many of the first `n_samples` positions belong to each part, (parts,).

        The positions are counted from the beginning of the first epoch, with the current weights.
        """
        cycles, rest = divmod(n_samples, _CYCLE)
        return cycles * self._counts + np.bincount(self._owners[:rest], minlength=len(self._counts))
