"""Order in which the ranks read samples, as pure functions of seed, epoch and position.

No list of samples is shuffled or stored. The order of an epoch is a keyed permutation that is
evaluated only at the positions that a rank needs. The state of the data order is therefore the
number of the optimizer step, which is equal on all ranks. A run can resume with a different number
of DataLoader workers, and with a different number of ranks if the global batch size is the same.

# N samples, A accumulate, W world_size, B batch_size, G = A * W * B samples per step
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Protocol

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


def mix64(values: np.ndarray) -> np.ndarray:
    """Hash uint64 values with the output function of SplitMix64, a bijection of uint64.

    All random choices of `gptrain.data` apply this function to a counter. A random number can then
    be computed without the numbers before it, and is the same on every machine and with every
    version of NumPy. `values` is not modified.
    """
    mixed = values ^ (values >> 30)
    mixed *= _FIRST_MULTIPLIER
    mixed ^= mixed >> 27
    mixed *= _SECOND_MULTIPLIER
    mixed ^= mixed >> 31
    return mixed


class Order(Protocol):
    """Interface of an order in which training reads the samples of a dataset.

    Attributes:
        n_samples: Number of positions of an epoch.
    """

    n_samples: int

    def index(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the sample index at each position of an epoch, int64, in the same shape.

        Args:
            epoch: Number of the epoch, from 0.
            positions: Positions in the epoch, from 0 to `n_samples - 1`.
        """
        ...


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
        self.seed = seed
        n_bits = max(2, (n_samples - 1).bit_length())
        n_low_bits = n_bits // 2
        n_high_bits = n_bits - n_low_bits
        self._n_low_bits = n_low_bits
        self._low_mask = 2**n_low_bits - 1
        self._high_mask = 2**n_high_bits - 1

    def index(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the sample index at each position of an epoch, int64, in the same shape.

        Args:
            epoch: Number of the epoch, from 0. Each epoch has another permutation.
            positions: Positions in the epoch, from 0 to `n_samples - 1`, in any shape.
        """
        key = mix64(np.array([self.seed + GOLDEN], dtype=np.uint64))
        key = mix64(key + np.uint64(epoch + GOLDEN))
        keys = mix64(key + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * GOLDEN)  # (rounds,)
        samples = self._permute(positions.astype(np.uint64).ravel(), keys)
        while (outside := np.flatnonzero(samples >= self.n_samples)).size:
            samples[outside] = self._permute(samples[outside], keys)
        return samples.astype(np.int64).reshape(positions.shape)

    def _permute(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return the Feistel network's permutation of values below 2^bits, in a new array.

        Args:
            values: Values to permute, (n,) uint64.
            keys: Key of each round of the network, (rounds,) uint64.
        """
        low = values & self._low_mask
        high = values >> self._n_low_bits
        for key_low, key_high in keys.reshape(-1, 2):
            low ^= mix64(high + key_low) & self._low_mask
            high ^= mix64(low + key_high) & self._high_mask
        return high << self._n_low_bits | low


class TrainBatches:
    """Batch sampler that yields the micro-batches of one rank, from the run's current position.

    The micro-batches of a run are an endless sequence. Each micro-batch depends on its number only,
    counted over the whole run. The data have N samples. A step of all W ranks takes G = A W B
    samples: A micro-batches of B samples on each rank. A new permutation of the data begins every
    N // G steps. Step s of a permutation takes the positions [s G, (s+1) G). Micro-step m of rank r
    takes the B positions from s G + (m W + r) B on. The samples of a step therefore depend on G,
    and not on the division of G into ranks and micro-steps. The last N mod G positions of each
    permutation are skipped on all ranks. They hold different samples in each permutation.

    An epoch of the DataLoader is a section of `epoch_steps` steps of this sequence. A permutation
    may begin inside an epoch. A run with shorter epochs sees the same samples in the same order.

    Args:
        order: Permutations of the samples.
        batch_size: Samples of a micro-batch on one rank, B.
        accumulate: Micro-batches per optimizer step, A.
        rank: Data-parallel rank.
        world_size: Number of data-parallel ranks, W.
        epoch_steps: Optimizer steps of one epoch. None takes one permutation, N // G.
        position: Function that returns the number of micro-batches that the whole run has done. It
            is called when an iterator is created.

    Attributes:
        resume_point: Tuple (step, number of a permutation, position in the permutation) at which
            the current global batch size G begins to apply. (0, 0, 0) unless the run was resumed; a
            resumed run sets it to the position in its checkpoint.
        n_turns: Number of data workers that take turns, from the first micro-batch of an epoch on.
            It matters for a stream, of which each worker reads a part of its own.

    Raises:
        DataError: If one step needs more samples than the dataset has.
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
        self.order = order
        self.batch_size = batch_size
        self.accumulate = accumulate
        self.rank = rank
        self.world_size = world_size
        self.position = position
        self.resume_point = (0, 0, 0)
        self.n_turns = 1

    def __len__(self) -> int:
        return self.epoch_steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        """Return the micro-batches of this rank from the current position to the end of the epoch.

        Each is a list of sample indices. Before them come empty lists, one for each worker whose
        turn has passed, so that every worker continues with its own turn.
        """
        done = self.position()
        epoch_end = (done // len(self) + 1) * len(self)
        passed = repeat([], done % len(self) % self.n_turns)
        return chain(passed, map(self._micro_batch, range(done, epoch_end)))

    def step_samples(self, step: int) -> np.ndarray:
        """Return the indices of all samples that all ranks read in an optimizer step.

        `step_samples(s)[m, r]` are the samples that rank r reads in micro-step m.

        Args:
            step: Number of the optimizer step, counted over the whole run from 0.

        Returns:
            Indices, (micro-steps, data ranks, batch_size).
        """
        slots = np.arange(self.accumulate * self.world_size).reshape(self.accumulate, -1)
        return self._samples(step, slots)

    def locate(self, step: int) -> tuple[int, int]:
        """Return the number of the permutation and the position in it at which a step begins.

        A run uses up one permutation of the samples after another, from number 0 on.

        Args:
            step: Number of the optimizer step, counted over the whole run from 0.
        """
        first_step, permutation, start = self.resume_point
        n_left = max(0, self.order.n_samples - start) // self.global_batch_size
        if step - first_step < n_left:
            return permutation, start + (step - first_step) * self.global_batch_size
        n_further, done_steps = divmod(step - first_step - n_left, self.permutation_steps)
        return permutation + 1 + n_further, done_steps * self.global_batch_size

    def _micro_batch(self, number: int) -> list[int]:
        """Return the sample indices of one of this rank's micro-batches.

        Args:
            number: Number of the micro-batch, counted over the whole run from 0.
        """
        step, micro_step = divmod(number, self.accumulate)
        return self._samples(step, np.array(micro_step * self.world_size + self.rank)).tolist()

    def _samples(self, step: int, slots: np.ndarray) -> np.ndarray:
        """Return the sample indices of some micro-batches of an optimizer step, (..., batch_size).

        Args:
            step: Number of the optimizer step, counted over the whole run from 0.
            slots: Number micro_step * world_size + rank of each micro-batch, (...).
        """
        permutation, start = self.locate(step)
        positions = start + slots[..., None] * self.batch_size + np.arange(self.batch_size)
        return self.order.index(permutation, positions)


class EvalBatches:
    """Batch sampler of an evaluation: gives each sample to exactly one rank, in dataset order.

    All ranks yield the same number of batches, because the ranks of a partitioned model run each
    batch together. Batches have `batch_size` samples, except for the last batches of each part,
    which divide the last samples of the part evenly.

    Args:
        lengths: Number of samples of each part of the dataset, whose parts follow each other. No
            batch has samples of two parts. The batches of the parts alternate (round robin). A
            dataset that is not a mixture has one part.
        batch_size: Samples of a batch on one rank.
        rank: Data-parallel rank.
        world_size: Number of data-parallel ranks.
        limit: Number of the batches of one process whose samples are evaluated, or their fraction.
            All ranks together evaluate these samples, see `limit_lengths`. None evaluates all.

    Attributes:
        short_parts: Numbers of the parts that have fewer samples than there are ranks. A rank
            without a sample of such a part yields [-1 - i], where i is the first sample of the
            part. `BatchReader` reads this index as sample i without targets.
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
        lengths = limit_lengths(lengths, batch_size, limit)
        self.short_parts = [part for part, n in enumerate(lengths) if 0 < n < world_size]
        self._batches: list[tuple[int, int, range]] = []  # (round, part, samples)
        for part, n_samples in enumerate(lengths):
            first = firsts[part]
            bounds = batch_bounds(n_samples, batch_size, rank, world_size)
            for round_number, (start, end) in enumerate(bounds):
                samples = range(first + start, first + end) or range(-1 - first, -first)
                self._batches.append((round_number, part, samples))
        self._batches.sort(key=lambda batch: batch[:2])

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(samples) for _, _, samples in self._batches)

    def part_of(self, number: int) -> int:
        """Return the number of the part to which a batch of this rank belongs.

        Args:
            number: Number of the batch, from 0.

        Raises:
            IndexError: If this rank has no such batch.
        """
        return self._batches[number][1]

    def samples_of(self, number: int) -> list[int]:
        """Return the sample indices of a batch of this rank, or [] if there is no such batch.

        A batch without a sample is [-1 - i], as described at `short_parts`.

        Args:
            number: Number of the batch, from 0.
        """
        return [index for _, _, samples in self._batches[number : number + 1] for index in samples]


def limit_lengths(lengths: Sequence[int], batch_size: int, limit: float | None) -> list[int]:
    """Return how many samples of each part of a dataset a limited evaluation reads.

    They are the first samples of the part, those in the first `limit` batches that one process
    reads. The set is therefore the same on any number of ranks.

    Args:
        lengths: Number of samples of each part.
        batch_size: Samples of a batch of the process.
        limit: Number of batches, or with a float their fraction, of which at least one is read.
            None reads all samples.
    """
    if limit is None:
        return list(lengths)
    batches = EvalBatches(lengths, batch_size)._batches
    n_batches = max(1, int(limit * len(batches))) if isinstance(limit, float) else limit
    counts = [0] * len(lengths)
    for _, part, samples in batches[:n_batches]:
        counts[part] += len(samples)
    return counts


def batch_bounds(
    n_samples: int, batch_size: int, rank: int, world_size: int
) -> list[tuple[int, int]]:
    """Return the first sample and the end (exclusive) of each batch of one rank in an evaluation.

    All ranks get equally many batches. In each round every rank has one batch. The samples after
    the last round of full batches are divided evenly into one more round. If fewer samples than
    ranks are left, they are divided together with the samples of the last full round: into two
    rounds, or for `batch_size=1` into one round of batches with one or two samples. A batch is
    empty only if there are fewer samples than ranks.

    Args:
        n_samples: Number of samples that all ranks share.
        batch_size: Samples of a full batch on one rank.
        rank: Data-parallel rank.
        world_size: Number of data-parallel ranks.
    """
    round_samples = batch_size * world_size
    n_full_rounds, n_left = divmod(n_samples, round_samples)
    n_short_rounds = 1 if n_left else 0
    if 0 < n_left < world_size and n_full_rounds:
        n_full_rounds -= 1
        n_left += round_samples
        n_short_rounds = 1 if batch_size == 1 else 2
    starts = [number * round_samples + rank * batch_size for number in range(n_full_rounds)]
    bounds = [(start, start + batch_size) for start in starts]
    first_left = n_full_rounds * round_samples
    n_slots = n_short_rounds * world_size
    for number in range(n_short_rounds):
        slot = number * world_size + rank
        start = first_left + n_left * slot // n_slots
        end = first_left + n_left * (slot + 1) // n_slots
        bounds.append((start, end))
    return bounds
