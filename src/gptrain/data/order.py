"""Order in which the ranks read samples, as pure functions of the seed and the step.

No list of samples is shuffled or stored. The order of an epoch is a keyed permutation that is
evaluated only at the positions that a rank needs. The state of the data order is therefore the
number of samples that were read before an optimizer step, which is equal on all ranks. A run can
resume with other numbers of DataLoader workers and ranks, and with another global batch size.

# N samples, A accumulate, W world_size, B batch_size, G = A * W * B samples per step
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptrain.core.errors import DataError

# Rounds of the Feistel network. Four rounds make it pseudorandom (Luby & Rackoff 1988); six are
# used because the halves have few bits if there are few samples.
_ROUNDS = 6
# Odd integer nearest to 2^64 / golden ratio, and the multipliers of SplitMix64 (Steele, Lea &
# Flood 2014, doi:10.1145/2660193.2660195; Stafford's variant 13).
GOLDEN = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
_SECOND_MULTIPLIER = 0x94D049BB133111EB
# Number of places after which the choice of parts repeats. The actual share of a part differs from
# its weight by at most the number of parts / 2^16.
_CYCLE = 2**16
_AHEAD = 64  # micro-batches whose samples are computed in one call


def mix64(values: np.ndarray) -> np.ndarray:
    """Hash uint64 values with the output function of SplitMix64, a bijection of uint64."""
    mixed = values ^ (values >> 30)
    mixed *= _FIRST_MULTIPLIER
    mixed ^= mixed >> 27
    mixed *= _SECOND_MULTIPLIER
    mixed ^= mixed >> 31
    return mixed


class SampleOrder:
    """Order that is another random permutation of all samples in every epoch, in O(1) memory.

    A Feistel network permutes 2^bits >= N values. A value of N or more is permuted again until the
    result is below N (cycle walking: fewer than 2 evaluations on average for N > 2).

    Args:
        n_samples: Number of samples, N.
        seed: Seed of the permutations.
    """

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples = n_samples
        self._key = mix64(np.array([seed + GOLDEN], dtype=np.uint64))
        n_bits = max(2, (n_samples - 1).bit_length())
        self._n_low_bits = n_bits // 2
        self._low_mask = 2**self._n_low_bits - 1
        self._high_mask = 2 ** (n_bits - self._n_low_bits) - 1

    def index(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples at places of the run, int64. Place N is the first of epoch 1."""
        epochs, positions = np.divmod(np.asarray(numbers, dtype=np.int64), self.n_samples)
        keys = mix64(epochs.astype(np.uint64) + GOLDEN + self._key)  # a key of each epoch
        rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * GOLDEN
        keys = mix64(np.add.outer(rounds, keys))  # (rounds, places)
        samples = self._permute(positions.astype(np.uint64), keys)
        while (outside := samples >= self.n_samples).any():
            samples[outside] = self._permute(samples[outside], keys[:, outside])
        return samples.astype(np.int64)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the Feistel network's permutation of values below 2^bits, in a new array."""
        low = values & self._low_mask
        high = values >> self._n_low_bits
        for key_low, key_high in zip(keys[::2], keys[1::2], strict=True):
            low ^= mix64(high + key_low) & self._low_mask
            high ^= mix64(low + key_high) & self._high_mask
        return high << self._n_low_bits | low


class MixtureOrder:
    """Order that mixes the samples of several parts in given shares. Each part has its own epochs.

    Each place of a run belongs to a part, in cycles of 2^16 places. The j-th of the n places of a
    part is at the fraction (j + 1/2) / n of a cycle, as far as other parts leave space: any window
    of places has the shares to within a few samples.

    Args:
        lengths: Number of samples of each part by name, in the order of the mixture.
        weights: Share of each part by name, relative to the sum of all weights.
        seed: Seed of the permutations.
    """

    def __init__(self, lengths: Mapping[str, int], weights: Mapping[str, float], seed: int) -> None:
        self.n_samples = sum(lengths.values())
        # The seed of a part depends on its name, not on the order of the parts in the config.
        number_of = sorted(lengths).index
        self._orders = [SampleOrder(n, seed + 1 + number_of(name)) for name, n in lengths.items()]
        self._firsts = np.cumsum([0, *lengths.values()])
        shares = np.array([weights[name] for name in lengths]) / sum(weights.values())
        self._counts = np.maximum(1, (shares * _CYCLE).astype(np.int64))  # (parts,) of a cycle
        self._counts[np.argmax(self._counts)] += _CYCLE - self._counts.sum()
        due = np.concatenate([(np.arange(n) + 0.5) / n for n in self._counts])
        by_due = np.argsort(due, kind="stable")
        # (cycle,) part of each place, and number of the place among those of its part
        self._owners = np.repeat(np.arange(len(shares)), self._counts)[by_due]
        self._ranks = np.concatenate([np.arange(n) for n in self._counts])[by_due]

    def index(self, numbers: np.ndarray) -> np.ndarray:
        """Return the samples that are read at some places of the run, int64, in the same shape."""
        cycles, places = np.divmod(np.asarray(numbers, dtype=np.int64), _CYCLE)
        owners = self._owners[places]
        taken = cycles * self._counts[owners] + self._ranks[places]
        samples = np.empty_like(taken)
        for part in np.unique(owners).tolist():
            own = owners == part
            samples[own] = self._firsts[part] + self._orders[part].index(taken[own])
        return samples


class MicroBatch(list[int]):
    """Indices of the samples of a micro-batch. `place` is the place of the first in the run."""

    place = 0


@dataclass(eq=False)
class TrainBatches:
    """Batch sampler that yields the micro-batches of one rank, from the run's current position.

    The samples of a run are an endless sequence, which `order` defines. A step of all W ranks takes
    the next G = A W B samples: A micro-batches of B samples on each rank. The samples of a step
    therefore depend on G, and not on the division of G into ranks and micro-steps. An epoch of the
    DataLoader is a section of `epoch_steps` steps of this sequence.

    Args:
        order: Order of the samples.
        batch_size: Samples of a micro-batch on one rank, B.
        accumulate: Micro-batches per optimizer step, A.
        rank: Data-parallel rank.
        world_size: Number of data-parallel ranks, W.
        epoch_steps: Optimizer steps of one epoch. 0 takes N // G.
        position: Function that returns the number of micro-batches that the whole run has done. It
            is called when an iterator begins.
        resumed: Pair of an optimizer step and the number of samples that were read before it. A
            resumed run sets it, because the steps before may have had another size G.

    Raises:
        DataError: If one step needs more samples than the dataset has.
    """

    order: SampleOrder | MixtureOrder
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world_size: int = 1
    epoch_steps: int = 0
    position: Callable[[], int] = lambda: 0
    resumed: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.global_batch_size = self.batch_size * self.world_size * self.accumulate
        n_samples, n_needed = self.order.n_samples, self.global_batch_size
        if n_samples < n_needed:
            raise DataError(f"data.train: {n_samples} samples, one step needs {n_needed}")
        self.epoch_steps = self.epoch_steps or n_samples // self.global_batch_size

    def __len__(self) -> int:
        return self.epoch_steps * self.accumulate

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank from the current position to the epoch's end."""
        done = self.position()
        end = (done // len(self) + 1) * len(self)
        for first in range(done, end, _AHEAD):
            numbers = np.arange(first, min(first + _AHEAD, end))
            steps, micro_steps = np.divmod(numbers, self.accumulate)
            slots = micro_steps * self.world_size + self.rank
            places = self.n_read(steps) + slots * self.batch_size
            samples = self.order.index(places[:, None] + np.arange(self.batch_size))
            for place, indices in zip(places.tolist(), samples.tolist(), strict=True):
                batch = MicroBatch(indices)
                batch.place = place
                yield batch

    def n_read(self, step: Any) -> Any:
        """Return how many samples all ranks have read before a step, an int or an array of ints."""
        first_step, n_before = self.resumed
        return n_before + (step - first_step) * self.global_batch_size

    def step_samples(self, step: int) -> np.ndarray:
        """Return the indices of the samples of a step, (micro-steps, data ranks, batch_size)."""
        numbers = self.n_read(step) + np.arange(self.global_batch_size)
        return self.order.index(numbers).reshape(self.accumulate, self.world_size, -1)


class EvalBatches:
    """Batch sampler of an evaluation: gives each sample to exactly one rank, in dataset order.

    All ranks yield the same number of batches: ranks of a partitioned model run each together.
    The batches of a part differ by at most one sample and have at most `batch_size`, or two if that
    is 1. A rank without a sample of a small part yields [-1 - i], where i is its first sample:
    `BatchReader` reads this index as sample i without targets.

    Args:
        lengths: Number of samples of each part of the dataset. The batches of the parts alternate.
        batch_size: Largest number of samples of a batch on one rank.
        rank: Data-parallel rank.
        world_size: Number of data-parallel ranks.
        limit: Number of batches of each part on all ranks together, an int, or their fraction, a
            float. None reads all. See `limit_lengths`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        limit: float | None = None,
    ) -> None:
        firsts = np.cumsum([0, *lengths]).tolist()
        self._batches: list[tuple[int, int, range]] = []  # (round, part, samples)
        for part, n_samples in enumerate(limit_lengths(lengths, batch_size, limit)):
            first = firsts[part]
            n_slots = -(-n_samples // (batch_size * world_size)) * world_size
            n_slots = min(n_slots, max(world_size, n_samples // world_size * world_size))
            for slot in range(rank, n_slots, world_size):
                start = first + n_samples * slot // n_slots
                end = first + n_samples * (slot + 1) // n_slots
                samples = range(start, end) or range(-1 - first, -first)
                self._batches.append((slot // world_size, part, samples))
        self._batches.sort(key=lambda batch: batch[:2])

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(samples) for _, _, samples in self._batches)

    def part_of(self, number: int) -> int:
        """Return the number of the part to which a batch of this rank belongs."""
        return self._batches[number][1]


def limit_lengths(lengths: Sequence[int], batch_size: int, limit: float | None) -> list[int]:
    """Return how many samples of each part of a dataset an evaluation reads, the first of the part.

    An int `limit` is the largest number of batches of a part, on all ranks together. A float is a
    fraction of the part's batches, of which at least one is read. None reads all. The result does
    not depend on the number of ranks.
    """
    limit = 1.0 if limit is None else limit
    if isinstance(limit, int):
        return [min(n, limit * batch_size) for n in lengths]
    return [min(n, max(1, int(limit * -(-n // batch_size))) * batch_size) for n in lengths]
