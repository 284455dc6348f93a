"""Reads an iterable dataset as if its samples had an index, and saves its position.

A stream is a dataset with `__iter__` and without an index: `datasets` in streaming mode, a
StreamingDataset of litdata, or a `torch.utils.data.IterableDataset`. It may have in addition:

- `split_by_rank(rank, world_size)`: Returns the stream of this rank's samples.
- `state_dict()` and `load_state_dict(state)`: Position after the sample that was yielded last.
  Without them, a resumed run reads the samples of the pass again, without training on them.
- `set_epoch(epoch)`: Called before a pass over the data begins again.
"""

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from gptrain.core.errors import DataError
from gptrain.data.samples import take_over_attributes

UNKNOWN_LENGTH = 2**40  # samples; no run reads so many


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated, because it has no index.

    It is an IterableDataset, or an iterable without `__getitem__` or without `__len__`.
    """
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_index)


class StreamDataset(Dataset):
    """Samples of one rank's part of a stream, each read once and in the order of the stream.

    `__getitems__` reads the next samples, whatever their indices. When the stream ends, it begins
    again.

    Args:
        stream: Stream of all ranks.
        name: Config key of the dataset, for messages.

    Attributes:
        split: How the samples are divided over the ranks, for the start of the run.
    """

    def __init__(self, stream: Any, name: str):
        self.stream = self.part = stream
        self.name = name
        self.split = "one rank"
        self.rank, self.stride = 0, 1  # a rank keeps one of each group of `stride` samples
        self.accumulate = 1
        self.epoch = 0
        self.n_read = 0  # samples of this rank in the current pass
        self._first: Any = None
        self._is_started = False
        self._samples = self._read_passes()
        self._n_batches = 0  # micro-batches that were read since the start
        # Number of micro-batches and position before each of the last two steps: a run may find one
        # step later that a step was not finite.
        self._positions: deque[tuple[int, Any]] = deque(maxlen=2)
        take_over_attributes(self, stream)

    def __len__(self) -> int:
        return len(self.stream) if hasattr(self.stream, "__len__") else UNKNOWN_LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return the first sample of the stream. The position does not change.

        Raises:
            DataError: If the stream is empty.
        """
        if self._first is None:
            state = self._state()["state"]
            self._first = next(iter(self.stream), None)
            if self._first is None:
                raise DataError(f"{self.name}: the stream has no sample")
            if state is not None:
                self.part.load_state_dict(state)
        return self._first

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the next samples of this rank, as many as there are indices.

        Before `start` was called, each item is the first sample of the stream: checks of the data
        read samples without a change of the position.

        Args:
            indices: List of the wanted length. Its values are not used.

        Raises:
            DataError: If a new pass over the stream has no sample.
        """
        if not self._is_started:
            return [self[0] for _ in indices]
        if self._n_batches % self.accumulate == 0:
            self._positions.append((self._n_batches, self._state()))
        self._n_batches += 1
        return list(islice(self._samples, len(indices)))

    def describe(self, n_samples: int = 0) -> str:
        """Return how the stream is divided over ranks and resumed, as one line.

        Args:
            n_samples: Number of samples of the run, not used.
        """
        resumes = "resumes exactly" if self._has_state() else "is read again on a resume"
        return f"a stream · {self.split} · {resumes}"

    def start(self, rank: int, world_size: int, accumulate: int) -> None:
        """Take the part of one rank and begin to read it.

        Call this method once, on every rank, before the first batch of the training.

        Args:
            rank: Index of this rank among the ranks that read different samples.
            world_size: Number of these ranks.
            accumulate: Micro-batches of an optimizer step.
        """
        self.accumulate, self.rank, self._is_started = accumulate, rank, True
        if world_size == 1:
            return
        if hasattr(self.stream, "split_by_rank"):
            self.part = self.stream.split_by_rank(rank, world_size)
            self.split = f"divided over {world_size} ranks by the dataset"
        elif type(self.stream).__module__.split(".")[0] == "datasets":
            # The stream is an object of this package, so the package is installed.
            distributed = import_module("datasets.distributed")
            self.part = distributed.split_dataset_by_node(self.stream, rank, world_size)
            self.split = f"divided over {world_size} ranks by split_dataset_by_node"
        else:
            self.stride = world_size
            self.split = f"every rank reads all samples and keeps one of {world_size}"
            if rank == 0:
                message = f"{self.name}: {self.split}; a method split_by_rank would read less"
                warnings.warn(message, stacklevel=2)

    def state_at(self, n_batches: int) -> dict[str, Any]:
        """Return the position after a number of micro-batches since the start of this process.

        Args:
            n_batches: Number of micro-batches of all complete steps. Batches of the next two steps
                may have been read already.

        Returns:
            Dict of `epoch` (number of the pass over the data), `state` (result of the dataset's
            state_dict, or None) and `n_read` (samples of this rank in the pass).
        """
        positions = {**dict(self._positions), self._n_batches: self._state()}
        return positions[n_batches]

    def load_state(self, position: dict[str, Any]) -> None:
        """Continue from a position that `state_at` returned in an earlier process.

        If the position has no state, the samples of the pass are read again and left out. A warning
        says so.

        Args:
            position: Position of this rank in its part of the stream.
        """
        self.epoch = position["epoch"]
        self._set_epoch()
        if position["state"] is not None:
            self.part.load_state_dict(position["state"])
        else:
            self.n_read = position["n_read"]
            text = f"the first {self.n_read} samples of each rank are read again and left out"
            if self.rank == 0:
                warnings.warn(
                    f"{self.name}: the stream cannot save its position; {text}", stacklevel=2
                )
        self._samples = self._read_passes()

    def _has_state(self) -> bool:
        """Return whether this rank's part of the stream can save and load its position."""
        has_methods = hasattr(self.part, "state_dict") and hasattr(self.part, "load_state_dict")
        return has_methods and not has_shuffle_buffer(self.part)

    def _state(self) -> dict[str, Any]:
        """Return the current position, with a copy of the part's state, see `state_at`."""
        state = copy.deepcopy(self.part.state_dict()) if self._has_state() else None
        return {"epoch": self.epoch, "state": state, "n_read": self.n_read}

    def _set_epoch(self) -> None:
        """Pass the number of the pass that begins to `set_epoch`, if the stream has this method."""
        if hasattr(self.part, "set_epoch"):
            self.part.set_epoch(self.epoch)

    def _read_passes(self) -> Iterator[Any]:
        """Yield this rank's samples from the current position on, and begin again after the last.

        If all ranks read the same stream, a rank keeps one of each group of `stride` samples. An
        incomplete last group is left out.

        Raises:
            DataError: If a complete pass has no sample.
        """
        is_complete = False  # the first pass may begin at the end of the stream
        while True:
            samples = islice(self.part, self.n_read * self.stride, None)
            while len(group := list(islice(samples, self.stride))) == self.stride:
                self.n_read += 1
                yield group[self.rank % self.stride]
            if is_complete and not self.n_read:
                raise DataError(f"{self.name}: the stream has no sample for this rank")
            is_complete = True
            self.epoch += 1
            self.n_read = 0
            self._set_epoch()


def has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream of the package `datasets` shuffles its samples in a buffer.

    The state of such a stream has no content of the buffer.
    """
    part = getattr(stream, "_ex_iterable", None)
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is not None


class LitDataStream:
    """Stream of litdata's StreamingDataset, in the form that `StreamDataset` reads.

    litdata divides the samples over the ranks, and counts the passes, by itself. Its `state_dict`
    takes the number of samples that a rank has read in the pass, which this class counts.

    Args:
        dataset: StreamingDataset. As `stream` it yields the samples of all ranks.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.n_nodes = dataset.distributed_env.num_nodes
        self.n_read = 0
        self.split_by_rank(0, 1)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset:
            self.n_read += 1
            yield sample
        self.n_read = 0

    def split_by_rank(self, rank: int, world_size: int) -> "LitDataStream":
        """Read the samples of one rank from now on.

        Args:
            rank: Index of the rank among those that read different samples.
            world_size: Number of these ranks.
        """
        n_nodes = 1 if world_size % self.n_nodes else self.n_nodes
        environment = type(self.dataset.distributed_env)
        self.dataset.distributed_env = environment(world_size, rank, n_nodes)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return litdata's state after the sample that was yielded last."""
        return self.dataset.state_dict(self.n_read, 1, self.dataset.batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.dataset.load_state_dict(state)
        self.n_read = state["num_samples_yielded"]


class ReadStream(Dataset):
    """All samples of a finite stream, in memory, for an evaluation.

    Args:
        stream: Stream of all ranks.
        n_samples: Largest number of samples to read, or None for all.
    """

    def __init__(self, stream: Any, n_samples: int | None):
        self.samples = list(islice(iter(stream), n_samples))
        take_over_attributes(self, stream)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def as_indexed(dataset: Any, name: str, n_samples: int | None) -> Dataset:
    """Return a dataset with an index: a stream is wrapped, any other dataset is returned unchanged.

    The training stream becomes a StreamDataset, which reads it batch by batch. The samples of any
    other stream are read into memory at once. An object that is no dataset at all is returned, too.

    Args:
        dataset: Dataset or stream.
        name: Config key of the dataset. The name `data.train` marks the training stream.
        n_samples: Largest number of samples of an evaluation, or None for all.
    """
    if not is_stream(dataset):
        return dataset
    if hasattr(dataset, "distributed_env"):
        dataset = LitDataStream(dataset)
    is_training = name == "data.train"
    return StreamDataset(dataset, name) if is_training else ReadStream(dataset, n_samples)


def find_stream(dataset: Any) -> StreamDataset | None:
    """Return the StreamDataset that a dataset reads, or None if it reads none.

    Args:
        dataset: A StreamDataset, or a wrapper that keeps the inner dataset in its attribute
            `dataset`.
    """
    while dataset is not None and not isinstance(dataset, StreamDataset):
        dataset = getattr(dataset, "dataset", None)
    return dataset
