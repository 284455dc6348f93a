"""Streams: iterable datasets that are read ahead of the training, and resume exactly.

A stream is a dataset with `__iter__` and without an index: `datasets` in streaming mode, or a
`torch.utils.data.IterableDataset`. It may have in addition:

- `split_by_rank(rank, world_size)`: Returns the stream of one rank's samples. A stream of
  `datasets` is split by its package. Of another stream, each rank reads all samples and keeps its
  share.
- `state_dict()` and `load_state_dict(state)`: Position after the sample that was yielded last.
  Without them, a resumed run reads the samples of the pass again, without training on them.
- `set_epoch(epoch)`: Called before a pass over the data begins again.

One worker process per rank reads the stream, so that a step does not wait for it. Before each
sample, the random generators of this process (`random`, NumPy, torch) are seeded with the seed of
the run and the number of the sample. So a stream that draws random numbers, for example to shuffle
its files in `__iter__`, draws the same ones when it is read again.
"""

import copy
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from gptrain.core.errors import DataError
from gptrain.data.samples import BatchReader, WrappedDataset, seed_all

UNKNOWN_LENGTH = 2**40  # samples; no run reads so many


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset is an IterableDataset, or can be iterated but has no index."""
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_index)


class StreamDataset(WrappedDataset):
    """Training stream in the form of a dataset with indices, which a DataLoader can read.

    `start` chooses this rank's part of the stream and the position in it. From then on
    `__getitems__` returns the next samples of the part, whatever the indices. When the part ends,
    the next pass over it begins. `dataset[i]` is always the first sample of the stream. The length
    is that of the stream, or UNKNOWN_LENGTH.

    Args:
        dataset: The stream, as the top of this file describes it.
        name: Config key of the dataset, for error messages.

    Raises:
        DataError: If the stream is a generator or another iterator of Python itself, which can be
            read only once. Reading a sample raises it if the stream has none.
    """

    def __init__(self, dataset: Any, name: str):
        super().__init__(dataset, name)
        if type(dataset).__module__ in ("builtins", "itertools"):
            message = f"a {type(dataset).__name__} can be read only once"
            raise DataError(f"{name}: {message}; needed: an object whose __iter__ begins again")
        self.part = dataset
        self.epoch = 0  # number of the pass over the data
        self.n_read = 0  # samples of the part in this pass
        self._samples: Iterator[Any] | None = None  # None before `start`

    def __len__(self) -> int:
        return len(self.dataset) if hasattr(self.dataset, "__len__") else UNKNOWN_LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return the first sample, whatever the index. The position does not change."""
        if "first" not in self.__dict__:
            state = self.position()["state"]
            self.first = next(iter(self.dataset), None)
            if self.first is None:
                raise DataError(f"{self.name}: the stream has no sample")
            if state is not None:
                self.part.load_state_dict(state)
        return self.first

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the next samples of the part; before `start`, the first sample for each index."""
        if self._samples is None:
            return [self[0] for _ in indices]
        return list(islice(self._samples, len(indices)))

    def describe(self, n_samples: int = 0) -> str:
        """Return a line that says how the stream resumes. `n_samples` is not used."""
        resumes = "continues" if self._has_state() else "is read again up to its position"
        return f"a stream, which one process per rank reads ahead · on a resume it {resumes}"

    def start(self, seed: int, rank: int, world_size: int, position: dict[str, Any] | None) -> None:
        """Choose the part of a rank, and the position from which `__getitems__` reads it.

        Call it once, in the process that reads.

        Args:
            seed: Seed for the random generators of this process, which each sample seeds again.
            rank: One of the `world_size` ranks that divide the stream.
            position: Result of `position()` in an earlier process. None for the beginning.
        """
        # The threads of `tokenizers` do not survive the fork of a worker.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # Ranks that read all samples draw the same random numbers, so that their shares differ.
        key, n_group, n_skipped = f"{seed} 0", world_size, 0
        if world_size > 1 and (split := find_split(self.dataset)):
            self.part = split(rank, world_size)
            key, n_group = f"{seed} {rank}", 1
        if position is not None:
            self._begin_pass(position["epoch"])
            if position["state"] is None:
                n_skipped = position["n_read"]
            else:
                self.n_read = position["n_read"]
                self.part.load_state_dict(position["state"])
        self._samples = islice(self._read_passes(key, rank % n_group, n_group), n_skipped, None)

    def position(self) -> dict[str, Any]:
        """Return the position in the part after the sample that was read last, as a new dict.

        It has `epoch` (number of the pass), `n_read` (samples of the part in this pass) and `state`
        of the stream. If that is None, a resume reads the samples of the pass again.
        """
        state = copy.deepcopy(self.part.state_dict()) if self._has_state() else None
        return {"epoch": self.epoch, "state": state, "n_read": self.n_read}

    def _has_state(self) -> bool:
        has_methods = hasattr(self.part, "state_dict") and hasattr(self.part, "load_state_dict")
        return has_methods and not has_shuffle_buffer(self.part)

    def _begin_pass(self, epoch: int) -> None:
        self.epoch = epoch
        self.n_read = 0
        if hasattr(self.part, "set_epoch"):
            self.part.set_epoch(epoch)

    def _read_passes(self, key: str, kept: int, n_group: int) -> Iterator[Any]:
        """Yield samples of the part, one of each group, from the position on, in endless passes."""
        is_complete = False  # the first pass may begin at the end of the stream
        while True:
            seed_all(f"{key} {self.epoch} {self.n_read}")
            samples = iter(self.part)
            while len(group := list(islice(samples, n_group))) == n_group:
                self.n_read += 1
                yield group[kept]
                seed_all(f"{key} {self.epoch} {self.n_read}")
            if is_complete and not self.n_read:
                raise DataError(f"{self.name}: the stream has no sample for this rank")
            is_complete = True
            self._begin_pass(self.epoch + 1)


class StreamReader(BatchReader):
    """Dataset for a DataLoader that returns the batches of a StreamDataset with their positions.

    A worker process reads ahead, and the training needs the position of the batches that it used.
    """

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, dict[str, Any]]:
        """Return the next batch, and the position of the stream after it."""
        return super().__getitems__(indices), self.dataset.position()


class StreamPositions:
    """Remembers the position in this rank's part of a stream after each of the last three steps.

    Args:
        accumulate: Micro-batches per optimizer step.

    Attributes:
        start: Position at which this process begins to read. None for the beginning.
    """

    def __init__(self, accumulate: int):
        self.start: dict[str, Any] | None = None
        self.accumulate = accumulate
        self._n_batches = 0  # micro-batches that were loaded since the start
        # A run may find one step later that a step was not finite, when the next one was loaded.
        self._after_steps: deque[tuple[int, Any]] = deque(maxlen=3)

    def record(self, results: Iterable[tuple[Any, dict[str, Any]]]) -> Iterator[Any]:
        """Yield the batches of a StreamReader, and record the position after each training step."""
        for batch, position in results:
            self._n_batches += 1
            if self._n_batches % self.accumulate == 0:
                self._after_steps.append((self._n_batches, position))
            yield batch

    def after(self, n_batches: int) -> dict[str, Any] | None:
        """Return the position `n_batches` micro-batches after `start`, which is that of 0.

        Raises:
            KeyError: If `n_batches` is not the end of one of the last three steps that were loaded.
        """
        return dict(self._after_steps)[n_batches] if n_batches else self.start


def as_indexed(dataset: Any, name: str, n_samples: int | None) -> Any:
    """Wrap a stream as a dataset whose samples have an index, and return others unchanged.

    The training stream (`name` is data.train) becomes a StreamDataset, with its errors. Of any
    other stream, `n_samples` samples, or all with None, are read into memory at once.
    """
    if not is_stream(dataset):
        return dataset
    if name == "data.train":
        return StreamDataset(dataset, name)
    return WrappedDataset(dataset, name, list(islice(dataset, n_samples)))


def find_stream(dataset: Any) -> StreamDataset | None:
    """Return the StreamDataset that a dataset is or wraps, or None if there is none."""
    while isinstance(dataset, WrappedDataset) and not isinstance(dataset, StreamDataset):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, StreamDataset) else None


def find_split(stream: Any) -> Callable[[int, int], Any] | None:
    """Return the function (rank, number of ranks) -> stream of a rank, or None if there is none."""
    if hasattr(stream, "split_by_rank"):
        return stream.split_by_rank
    if type(stream).__module__.split(".")[0] == "datasets":
        # The stream is an object of this package, so the package is installed.
        return partial(import_module("datasets.distributed").split_dataset_by_node, stream)
    return None


def has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream of `datasets` shuffles in a buffer, which its state lacks."""
    part = getattr(stream, "_ex_iterable", None)
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is not None
