"""Which samples a rank reads, in which order: pure functions of (seed, epoch, position).

Nothing is drawn, stored or shuffled. The order of an epoch is a keyed permutation that is
evaluated at the positions needed, so that the place in the data is one integer, equal on all
ranks, and survives a restart with other workers, or with another number of ranks at the same
global batch.

# N samples, A accumulate, W world_size, B batch_size, G = A * W * B samples per step
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from gptrain.core.small_files import DataError

_ROUNDS = 6  # 4 make a Feistel network pseudorandom (Luby & Rackoff 1988); 6 for narrow halves
# Odd 2^64 / golden ratio and the multipliers of SplitMix64 (Steele, Lea & Flood 2014,
# doi:10.1145/2660193.2660195; Stafford's variant 13).
GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, a bijection of uint64; `values` are left as they are.

    All randomness of this room is this function of counters, so that any number can be had without
    those before it, and is the same on every machine and version of NumPy.
    """
    mixed = values ^ (values >> 30)
    mixed *= _FIRST
    mixed ^= mixed >> 27
    mixed *= _SECOND
    mixed ^= mixed >> 31
    return mixed


class Order(Protocol):
    """In which training reads samples."""

    n_samples: int

    def index(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Samples, int64, in the shape of `positions` of an epoch of n_samples."""
        ...


class SampleOrder:
    """A permutation of N samples for every epoch, in O(1) memory.

    A Feistel network permutes 2^bits >= N values; one that falls outside is sent through again
    until it falls inside (cycle walking, fewer than 2 turns on average).
    """

    def __init__(self, n_samples: int, seed: int) -> None:
        self.n_samples, self.seed = n_samples, seed
        bits = max(2, (n_samples - 1).bit_length())
        self._width = bits // 2  # of the lower half
        self._low, self._high = 2 ** (bits // 2) - 1, 2 ** (bits - bits // 2) - 1

    def index(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """The samples at these positions of an epoch, int64, in the shape of `positions`."""
        key = mix64(np.array([self.seed + GOLDEN], dtype=np.uint64))
        key = mix64(key + np.uint64(epoch + GOLDEN))
        keys = mix64(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * GOLDEN)  # (rounds,)
        samples = self._permute(positions.astype(np.uint64).ravel(), keys)
        while (outside := np.flatnonzero(samples >= self.n_samples)).size:
            samples[outside] = self._permute(samples[outside], keys)
        return samples.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        low, high = values & self._low, values >> self._width
        for key_low, key_high in keys.reshape(-1, 2):
            low ^= mix64(high + key_low) & self._low
            high ^= mix64(low + key_high) & self._high
        return high << self._width | low


class TrainBatches:
    """A batch sampler: this rank's micro-batches of one epoch of the loader, from where the run is.

    The sequence of micro-batches of a run has no end and is a pure function of their number,
    counted over the whole run. Every N // G steps it takes a new permutation of the data: step s
    of a permutation has exactly its positions [s G, (s+1) G), and micro-step m of rank r takes B
    of them at s G + (m W + r) B. So a step's samples depend on G alone, not on how they are
    divided among ranks and micro-steps. The last N mod G of each permutation, other samples each
    time, are left out on all ranks alike.

    An epoch of the loader is a section of that sequence of `epoch_steps` steps, whichever
    permutation it lies in: a run of shorter epochs sees the same samples in the same order.

    Args:
        order: the permutations.   accumulate: micro-batches per optimizer step, A.
        epoch_steps: optimizer steps of one epoch; None: N // G, one permutation.
        position: how many micro-batches of the whole run are done, asked as an iterator is made.
    Attributes:
        begin: step, permutation and position in it from where steps are of this size; a run that
            goes on with steps of another size sets it to the `place` where it stood.
    Raises: DataError if one step needs more samples than there are.
    """

    def __init__(
        self,
        order: Order,
        batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
        *,
        epoch_steps: int | None = None,
        position: Callable[[], int] = lambda: 0,
    ) -> None:
        self.global_batch_size = batch_size * world_size * accumulate
        self.permutation_steps = order.n_samples // self.global_batch_size
        if self.permutation_steps == 0:
            raise DataError(f"{order.n_samples} sequences, one step needs {self.global_batch_size}")
        self.epoch_steps = epoch_steps or self.permutation_steps
        self.order, self.batch_size, self.accumulate = order, batch_size, accumulate
        self.rank, self.world_size, self.position = rank, world_size, position
        self.begin = (0, 0, 0)

    def __len__(self) -> int:
        return self.epoch_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """From the run's position, as it is now, to the end of the epoch that it lies in."""
        done = self.position()
        return map(self._micro_batch, range(done, (done // len(self) + 1) * len(self)))

    def step_samples(self, step: int) -> np.ndarray:
        """All samples of optimizer step `step`, counted over the whole run: (A, W, B).

        `step_samples(s)[m, r]` is what rank r reads in micro-step m, to be named in an error.
        """
        slots = np.arange(self.accumulate * self.world_size).reshape(self.accumulate, -1)
        return self._samples(step, slots)

    def place(self, step: int) -> tuple[int, int]:
        """The permutation, and the position in it, where a step begins."""
        begun, permutation, start = self.begin
        n_left = max(0, self.order.n_samples - start) // self.global_batch_size
        if step - begun < n_left:
            return permutation, start + (step - begun) * self.global_batch_size
        further, done = divmod(step - begun - n_left, self.permutation_steps)
        return permutation + 1 + further, done * self.global_batch_size

    def _micro_batch(self, number: int) -> list[int]:
        step, micro_step = divmod(number, self.accumulate)
        return self._samples(step, np.array(micro_step * self.world_size + self.rank)).tolist()

    def _samples(self, step: int, slots: np.ndarray) -> np.ndarray:
        """The B samples of each slot of a step, slot = micro_step * W + rank: (..., B)."""
        permutation, start = self.place(step)
        positions = start + slots[..., None] * self.batch_size + np.arange(self.batch_size)
        return self.order.index(permutation, positions)


class EvalBatches:
    """A batch sampler in file order: every sample once, over all ranks together.

    All ranks yield equally many batches, because ranks of a partitioned net run each batch
    together. Batches have `batch_size` samples but for the last of each part, which are shorter.

    Args:
        lengths: Samples of each of the parts that lie one after another. No batch has samples of
            two parts, and the batches of all parts take turns.

    Attributes:
        short_parts: Parts with fewer samples than there are ranks. A rank that has no sample of
            such a part yields [-1 - i], where i is the first sample of the part; see BatchReader.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        firsts = np.cumsum([0, *lengths]).tolist()
        self.short_parts = [part for part, n in enumerate(lengths) if 0 < n < world_size]
        self._batches: list[tuple[int, int, range]] = []  # turn, part, samples
        for part, n_samples in enumerate(lengths):
            for turn, (start, end) in enumerate(deal(n_samples, batch_size, rank, world_size)):
                first = firsts[part]
                samples = range(first + start, first + end) or range(-1 - first, -first)
                self._batches.append((turn, part, samples))
        self._batches.sort(key=lambda batch: batch[:2])

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(samples) for _, _, samples in self._batches)

    def part_of(self, number: int) -> int:
        """The part that all samples of a batch are of, by the number of the batch."""
        return self._batches[number][1]


def deal(n_samples: int, batch_size: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Return start and end of each batch of one rank, so that all ranks have equally many.

    What is left after the last round of full batches is divided evenly. If that is less than one
    sample per rank, the last full round is divided with it: into two rounds, or, of batches of one
    sample, into one round of one or two samples. Only a rank of more ranks than samples has an
    empty batch.
    """
    round_samples = batch_size * world_size
    n_full, n_left = divmod(n_samples, round_samples)
    n_uneven = int(n_left > 0)  # rounds of shorter batches
    if 0 < n_left < world_size and n_full:
        n_full, n_left, n_uneven = n_full - 1, n_left + round_samples, 1 if batch_size == 1 else 2
    starts = [turn * round_samples + rank * batch_size for turn in range(n_full)]
    bounds = [(start, start + batch_size) for start in starts]
    for turn in range(n_uneven):
        slot, n_slots = turn * world_size + rank, n_uneven * world_size
        ends = (n_left * slot // n_slots, n_left * (slot + 1) // n_slots)
        bounds.append((n_full * round_samples + ends[0], n_full * round_samples + ends[1]))
    return bounds
