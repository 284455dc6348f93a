"""Wrappers that read a stream as if its samples had an index, and save its position.

A stream is a dataset with `__iter__` and without an index: `datasets` in streaming mode, a
StreamingDataset of litdata, or a `torch.utils.data.IterableDataset`. It may have in addition:

- `split_by_rank(rank, world_size)`: Returns the stream of one reader's samples, where the arguments
  are the number of the reader and the number of readers. The readers are the data workers of all
  ranks, or the ranks if there are no workers. Without this method every reader reads all samples
  and keeps its share, so that workers save no time.
- `state_dict()` and `load_state_dict(state)`: Position after the sample that was yielded last.
  Without them, a resumed run reads the samples of the pass again, without training on them.
- `set_epoch(epoch)`: Called before a pass over the data begins again.
"""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils import worker

from gptrain.core.errors import DataError
from gptrain.data.samples import BatchReader, take_over_attributes

UNKNOWN_LENGTH = 2**40  # samples; no run reads so many


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be iterated, because its samples have no index.

    This is so for an IterableDataset, and for an iterable that lacks `__getitem__` or `__len__`.

    Args:
        dataset: Object of any type.
    """
    has_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_index)


class StreamDataset(Dataset):
    """Dataset that reads one part of a training stream, in the order of the stream.

    The stream is divided into parts, one for each reader: the training process of a rank or, with
    data.num_workers, each worker of the rank. `__getitems__` reads the next samples of the part,
    whatever their indices. When the part ends, the next pass over it begins.

    Args:
        stream: Stream of the samples of all parts.
        name: Config key of the dataset, for messages.

    Attributes:
        n_parts: Number of parts, over all ranks and their workers. Set by TextDataModule.
        number: Number of the part that this process reads, set by `start`.
        part: Stream that this process reads: all of `stream`, or its part of it.
    """

    def __init__(self, stream: Any, name: str):
        self.stream = self.part = stream
        self.name = name
        self.n_parts = 1
        self.number = 0
        self.stride = 1  # the part has one of each group of `stride` samples
        self.epoch = 0
        self.n_read = 0  # samples of the part in the current pass
        self._first: Any = None
        self._samples: Iterator[Any] | None = None  # None before `start`
        take_over_attributes(self, stream)

    def __len__(self) -> int:
        return len(self.stream) if hasattr(self.stream, "__len__") else UNKNOWN_LENGTH

    def __getitem__(self, index: int) -> Any:
        """Return the first sample of the stream, whatever the index. The position does not change.

        Raises:
            DataError: If the stream is empty.
        """
        if self._first is None:
            state = self.position()["state"]
            self._first = next(iter(self.stream), None)
            if self._first is None:
                raise DataError(f"{self.name}: the stream has no sample")
            if state is not None:
                self.part.load_state_dict(state)
        return self._first

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the next samples of the part, as many as there are indices.

        Before `start` was called, each item is the first sample of the stream, so that checks of
        the data do not change the position.

        Args:
            indices: Sequence of the wanted length. Its values are not used.

        Raises:
            DataError: If the stream is empty, or a complete pass has no sample for this part.
        """
        if self._samples is None:
            return [self[0] for _ in indices]
        return list(islice(self._samples, len(indices)))

    def describe(self, n_samples: int = 0) -> str:
        """Return a line that says how the stream is divided over its readers and how it resumes.

        Args:
            n_samples: Number of samples of the run, not used.
        """
        resumes = "resumes exactly" if self._has_state() else "is read again on a resume"
        return f"a stream · {self._division()[1]} · {resumes}"

    def warn(self, position: dict[str, Any] | None) -> None:
        """Warn if samples will be read and not used. Call it on one rank, before the training.

        There is one warning if every reader has to read the samples of all parts, and one if the
        stream could not save its position, so that a resumed run reads the samples before the
        position again.

        Args:
            position: Position at which the reading begins. None is the beginning of the stream.
        """
        split, text = self._division()
        if self.n_parts > 1 and split is None:
            message = f"{self.name}: {text}; a method split_by_rank would read less"
            warnings.warn(message, stacklevel=2)
        if position is not None and position["state"] is None:
            text = f"the first {position['n_read']} samples of each reader are read again, left out"
            message = f"{self.name}: the stream cannot save its position; {text}"
            warnings.warn(message, stacklevel=2)

    def start(self, number: int, position: dict[str, Any] | None) -> None:
        """Choose the part that `__getitems__` reads from now on, and the position in it.

        Call this method once, in the process that reads the part. `get_worker_info` of torch then
        returns None in this process.

        Args:
            number: Number of the part.
            position: Result of the method `position` for this part in an earlier process. None
                begins at the first sample. If it has no `state`, the samples of the pass are read
                again and left out.
        """
        self.number = number
        # Datasets divide themselves over the workers that they see, and litdata saves no position
        # in a worker. Hide the workers, because the parts are those of all ranks and workers.
        worker._worker_info = None
        split = self._division()[0]
        if split is None:
            self.stride = self.n_parts
        else:
            self.part = split(number, self.n_parts)
        if position is not None:
            self.epoch = position["epoch"]
            self._set_epoch()
            self.n_read = position["n_read"]
            if position["state"] is not None:
                self.part.load_state_dict(position["state"])
        self._samples = self._read_passes()

    def position(self) -> dict[str, Any]:
        """Return the position in the part after the sample that was read last.

        Returns:
            Dict of `epoch` (number of the pass over the data), `state` (copy of the result of the
            stream's state_dict, or None if the stream cannot save its position) and `n_read`
            (samples of the part in the pass).
        """
        state = copy.deepcopy(self.part.state_dict()) if self._has_state() else None
        return {"epoch": self.epoch, "state": state, "n_read": self.n_read}

    def _division(self) -> tuple[Callable[[int, int], Any] | None, str]:
        """Return the function that makes a part of the stream, and a description of the division.

        Returns:
            Function (number of a part, number of parts) -> stream of the part, or None if each
            reader reads the samples of all parts; and the description, for the user.
        """
        if self.n_parts == 1:
            return None, "one reader"
        readers = f"divided over {self.n_parts} readers"
        if hasattr(self.stream, "split_by_rank"):
            return self.stream.split_by_rank, f"{readers} by the dataset"
        if type(self.stream).__module__.split(".")[0] == "datasets":
            # The stream is an object of this package, so the package is installed.
            split = import_module("datasets.distributed").split_dataset_by_node
            return partial(split, self.stream), f"{readers} by split_dataset_by_node"
        return None, f"every reader reads all samples and keeps one of {self.n_parts}"

    def _has_state(self) -> bool:
        """Return whether the part can save and load its exact position."""
        has_methods = hasattr(self.part, "state_dict") and hasattr(self.part, "load_state_dict")
        return has_methods and not has_shuffle_buffer(self.part)

    def _set_epoch(self) -> None:
        """Call the stream's `set_epoch`, if any, with the number of the pass that begins."""
        if hasattr(self.part, "set_epoch"):
            self.part.set_epoch(self.epoch)

    def _read_passes(self) -> Iterator[Any]:
        """Yield the samples of the part from the current position on, in pass after pass.

        The iterator does not end. If the stream cannot be divided, every reader reads all of it and
        keeps one of each group of `stride` samples, where `stride` is the number of parts. An
        incomplete last group is left out. Otherwise `stride` is 1.

        Raises:
            DataError: If a complete pass has no sample.
        """
        is_complete = False  # the first pass may begin at the end of the stream
        while True:
            n_again = 0 if self._has_state() else self.n_read  # samples of an earlier start
            samples = islice(self.part, n_again * self.stride, None)
            while len(group := list(islice(samples, self.stride))) == self.stride:
                self.n_read += 1
                yield group[self.number % self.stride]
            if is_complete and not self.n_read:
                raise DataError(f"{self.name}: the stream has no sample for this reader")
            is_complete = True
            self.epoch += 1
            self.n_read = 0
            self._set_epoch()


class PositionReader(Dataset):
    """Dataset that reads the batches of a stream, each with the position of the part after it.

    A data worker reads batches ahead. The training process needs the position of the batches that
    it has used, so the position has to come with each batch.

    Args:
        batches: Dataset whose `__getitems__` reads a batch of the stream.
        stream: Stream that it reads.
    """

    def __init__(self, batches: BatchReader, stream: StreamDataset):
        self.batches = batches
        self.stream = stream

    def __getitems__(self, indices: Sequence[int]) -> tuple[Any, int, dict[str, Any]]:
        """Return the next batch, the number of the part, and the position in it after the batch.

        Args:
            indices: Sequence of the length of the batch. Its values are not used. If it is empty,
                nothing is read, and the batch is None.

        Raises:
            DataError: If the stream has no sample for this part, or its samples form no batch.
        """
        batch = self.batches.__getitems__(indices) if indices else None
        return batch, self.stream.number, self.stream.position()


class StreamPositions:
    """Remembers where the parts of a stream that one rank reads were after each of the last steps.

    Batches are loaded ahead, so a checkpoint needs an earlier position than the newest one.

    Args:
        numbers: Numbers of the parts that this rank reads.
        accumulate: Micro-batches of an optimizer step.

    Attributes:
        newest: Position of each part by its number, after the newest micro-batch that was loaded.
            None for a part of which nothing was read.
    """

    def __init__(self, numbers: Iterable[int], accumulate: int):
        self.newest: dict[int, dict[str, Any] | None] = dict.fromkeys(numbers)
        self.accumulate = accumulate
        self._n_batches = 0  # micro-batches that were loaded since the start
        # A run may find one step later that a step was not finite, when the next one was loaded.
        self._after_steps = deque([(0, self.newest)], maxlen=3)

    def load(self, positions: Sequence[dict[str, Any] | None]) -> None:
        """Set the positions at which a resumed run begins to read.

        Args:
            positions: Positions of all parts of the stream, in the order of their numbers.
        """
        self.newest.update((number, positions[number]) for number in self.newest)

    def record(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and record the position that came with each of them.

        Args:
            batches: Results of `PositionReader`. A result whose batch is None is left out.
        """
        for batch, number, position in batches:
            if batch is None:
                continue
            self.newest = {**self.newest, number: position}
            self._n_batches += 1
            if self._n_batches % self.accumulate == 0:
                self._after_steps.append((self._n_batches, self.newest))
            yield batch

    def after(self, n_batches: int) -> dict[int, dict[str, Any] | None]:
        """Return the position of each part after some micro-batches since this process started.

        Args:
            n_batches: Number of micro-batches of all complete steps. Batches of the next two steps
                may have been loaded already.

        Raises:
            KeyError: If `n_batches` is not the end of a step, or if more than two later steps were
                loaded, so that the position is forgotten.
        """
        return dict(self._after_steps)[n_batches]


def has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream of the package `datasets` shuffles its samples in a buffer.

    The saved state of such a stream lacks the content of the buffer, so that it cannot resume
    exactly.

    Args:
        stream: Stream of any type.
    """
    part = getattr(stream, "_ex_iterable", None)
    while part is not None and type(part).__name__ != "BufferShuffledExamplesIterable":
        part = getattr(part, "ex_iterable", None)
    return part is not None


class LitDataStream:
    """Adapter of litdata's StreamingDataset to the form that `StreamDataset` reads.

    litdata divides the samples over the readers, and counts the passes, by itself. Its `state_dict`
    takes the number of samples that a reader has read in the pass, which this class counts.

    Args:
        dataset: StreamingDataset. It yields all samples until `split_by_rank` is called.
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
        """Make this stream yield the samples of one reader from now on, and return it.

        Args:
            rank: Number of the reader.
            world_size: Number of readers.
        """
        n_nodes = 1 if world_size % self.n_nodes else self.n_nodes
        environment = type(self.dataset.distributed_env)
        self.dataset.distributed_env = environment(world_size, rank, n_nodes)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return litdata's state after the sample that was yielded last."""
        return self.dataset.state_dict(self.n_read, 1, self.dataset.batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the sample at which `state_dict` returned this state."""
        self.dataset.load_state_dict(state)
        self.n_read = state["num_samples_yielded"]


class ReadStream(Dataset):
    """Dataset that reads a stream into memory at once, for an evaluation.

    Args:
        stream: Stream of the samples of all ranks. It must end, or `n_samples` must be given.
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
    """Wrap a stream as a dataset whose samples have an index.

    The training stream becomes a StreamDataset, which reads it batch by batch. The samples of any
    other stream are read into memory at once. An object that is not a stream is returned unchanged.

    Args:
        dataset: Dataset or stream.
        name: Config key of the dataset. The name `data.train` marks the training stream.
        n_samples: Largest number of samples to read into memory, or None for all.
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
