"""Streams: iterable datasets that are read ahead of the training, and resume exactly.

A stream is a dataset with `__iter__` and without an index: `datasets` in streaming mode, or a
`torch.utils.data.IterableDataset`. It may have in addition:

- `split_by_rank(rank, world_size)`: Returns the stream of one rank's samples. A stream of
  `datasets` is split by its package. Of another stream, each rank reads all samples and keeps its
  share.
- `state_dict()` and `load_state_dict(state)`: Position after the sample that was yielded last.
  Without them, a resumed run reads the samples of the pass again, without training on them.
- `set_epoch(epoch)`: Called before each pass over the data, with its number from 0.

One worker process per rank reads the stream, so that a step does not wait for it. Before each
sample, the random generators of this process (`random`, NumPy, torch) are seeded with the seed of
the run and the number of the sample. So a stream that draws random numbers, for example to shuffle
its files in `__iter__`, draws the same ones when it is read again.
"""

import copy
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from gptrain.core.errors import DataError
from gptrain.data.samples import Samples, seed_all

UNKNOWN_LENGTH = 2**40  # samples; no run reads so many


class StreamDataset(Samples):
    """Training stream, in a form that a DataLoader with one worker can read.

    `dataset[0]` is the first sample of the stream. After `divide`, `__getitems__` returns the next
    samples of this rank's part of the stream, whatever the indices. When the part ends, the next
    pass over it begins. The length is that of the stream, or UNKNOWN_LENGTH.

    Args:
        dataset: The stream, as the top of this file describes it.
        name: Config key of the dataset, for error messages.

    Raises:
        DataError: If the stream has no sample, or if it is a generator or another iterator of
            Python itself, which can be read only once.
    """

    def __init__(self, dataset: Any, name: str):
        if type(dataset).__module__ in ("builtins", "itertools"):
            message = f"a {type(dataset).__name__} can be read only once"
            raise DataError(f"{name}: {message}; needed: an object whose __iter__ begins again")
        self.part = dataset
        state = self._state()
        super().__init__(dataset, name, samples=list(islice(dataset, 1)))
        if not self.samples:
            raise DataError(f"{name}: the stream has no sample")
        if state is not None:
            dataset.load_state_dict(state)
        self._following: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset) if hasattr(self.dataset, "__len__") else UNKNOWN_LENGTH

    def divide(self, seed: int, rank: int, world_size: int, start: dict[str, Any] | None) -> None:
        """Choose the part of a rank, and the position from which `__getitems__` reads it.

        Args:
            seed: Seed for the random generators of the process that reads, which each sample seeds
                again.
            rank: Number of this rank among the `world_size` ranks that divide the stream.
            start: Position that `with_position` returned in an earlier run. None for the beginning.
        """
        self._arguments = seed, rank, world_size, start or {"epoch": 0, "n_read": 0, "state": None}

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the next samples of the part."""
        if self._following is None:
            self._following = self._read(*self._arguments)
        samples = islice(self._following, len(indices))
        return [self.in_form(sample, self.n_read) for sample in samples]

    def with_position(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return a batch and the position in the part after the sample that was read last.

        The position has `epoch` (number of the pass), `n_read` (samples of the part in this pass)
        and `state` of the stream. If that is None, a resume reads the samples of the pass again.
        """
        return batch, {"epoch": self.epoch, "n_read": self.n_read, "state": self._state()}

    def describe(self, n_samples: int = 0) -> str:
        """Return a line that says how the stream resumes. `n_samples` is not used."""
        resumes = "is read again up to its position" if self._state() is None else "continues"
        return f"a stream, which one process per rank reads ahead · on a resume it {resumes}"

    def _state(self) -> Any:
        """Return a copy of the part's state, or None if the stream cannot continue from it."""
        has_methods = hasattr(self.part, "state_dict") and hasattr(self.part, "load_state_dict")
        is_exact = has_methods and not has_shuffle_buffer(self.part)
        return copy.deepcopy(self.part.state_dict()) if is_exact else None

    def _read(self, seed: int, rank: int, world_size: int, start: dict[str, Any]) -> Iterator[Any]:
        """Yield the samples of a rank's part from a position on, in endless passes."""
        # The threads of `tokenizers` do not survive the fork of a worker.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # Ranks that read all samples draw the same random numbers, so that their shares differ.
        key, n_group = f"{seed} 0", world_size
        if world_size > 1 and (part := split_by_rank(self.dataset, rank, world_size)) is not None:
            self.part = part
            key, n_group = f"{seed} {rank}", 1
        state, n_done = start["state"], start["n_read"]  # The first pass begins after n_done.
        for epoch in count(start["epoch"]):
            self.epoch = epoch  # number of the pass over the data
            self.n_read = 0  # samples of the part in this pass
            if hasattr(self.part, "set_epoch"):
                self.part.set_epoch(epoch)
            if state is not None:
                self.part.load_state_dict(state)
                self.n_read = n_done
            seed_all(f"{key} {epoch} {self.n_read}")
            samples = iter(self.part)
            while len(group := list(islice(samples, n_group))) == n_group:
                self.n_read += 1
                if self.n_read > n_done:
                    yield group[rank % n_group]
                seed_all(f"{key} {epoch} {self.n_read}")
            if not self.n_read:
                raise DataError(f"{self.name}: the stream has no sample for this rank")
            state, n_done = None, 0


def as_indexed(dataset: Any, name: str, n_samples: int | None) -> Any:
    """Wrap a stream as a dataset whose samples have an index, and return others unchanged.

    A stream is an IterableDataset, or a dataset that can be iterated but has no index.
    The training stream (`name` is data.train) becomes a StreamDataset, with its errors. Of any
    other stream, `n_samples` samples, or all with None, are read into memory at once. Raises a
    DataError for an object that has neither an index nor an iterator.
    """
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if has_index and not isinstance(dataset, IterableDataset):
        return dataset
    if not hasattr(dataset, "__iter__"):
        raise DataError(f"{name}: a {type(dataset).__name__} has no __len__ and __getitem__")
    if name == "data.train":
        return StreamDataset(dataset, name)
    return Samples(dataset, name, samples=list(islice(dataset, n_samples)))


def split_by_rank(stream: Any, rank: int, world_size: int) -> Any:
    """Return the part of a stream that a rank reads, or None if the stream cannot be divided."""
    if hasattr(stream, "split_by_rank"):
        return stream.split_by_rank(rank, world_size)
    if type(stream).__module__.split(".")[0] == "datasets":
        # The stream is an object of this package, so the package is installed.
        return import_module("datasets.distributed").split_dataset_by_node(stream, rank, world_size)
    return None


def has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream of `datasets` shuffles in a buffer, which its state lacks."""
    parts = [getattr(stream, "_ex_iterable", None)]
    for part in parts:  # the list grows; interleaved and concatenated streams have several parts
        parts += getattr(part, "ex_iterables", [getattr(part, "ex_iterable", None)] if part else [])
    return any(type(part).__name__ == "BufferShuffledExamplesIterable" for part in parts)
