"""How samples are read from a dataset and stacked to batches.

# B batch, T positions of a sample
"""

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from gptrain.core.errors import DataError
from gptrain.loss import IGNORED

# Optional attributes and methods of a dataset, see gptrain.data.
OPTIONAL_ATTRIBUTES = ("describe", "end_id", "fingerprint", "token_bytes", "tokenizer")
SHOWN_KEYS = 8  # largest number of keys of a dict, or items of a tuple, in an error message


def len_of(dataset: Dataset) -> int:
    """Return the number of samples of a dataset, `len(dataset)`.

    The class `Dataset` of torch does not declare `__len__`, so the type checker needs this
    function.
    """
    return len(cast(Sized, dataset))


def take_over_attributes(wrapper: Dataset, dataset: Any) -> None:
    """Give a dataset that wraps another one the optional attributes of the wrapped dataset.

    The attributes are those in OPTIONAL_ATTRIBUTES, such as `tokenizer`. An attribute that the
    class of the wrapper has itself is kept.

    Args:
        wrapper: Dataset that reads its samples from `dataset`.
        dataset: Dataset or stream.
    """
    for name in OPTIONAL_ATTRIBUTES:
        if hasattr(dataset, name) and not hasattr(type(wrapper), name):
            setattr(wrapper, name, getattr(dataset, name))


class BatchDataset(Dataset):
    """Base class of datasets that read a whole batch at once, in their method `__getitems__`."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens (B, T) and targets (B, T), int64.

        If samples hold several documents that must not see each other, the third item is the index
        of the document of each token, (B, T), int64.

        Args:
            indices: Indices of the samples, (B,).
        """

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return one sample: tokens (T,), targets (T,) and, if batches have it, a third item.

        A negative index counts from the end.

        Raises:
            IndexError: If the dataset has no such sample.
        """
        n_samples = len_of(self)
        if not -n_samples <= index < n_samples:
            raise IndexError(f"sample {index}: the dataset has only {n_samples} samples")
        return tuple(item[0] for item in self.__getitems__([index % n_samples]))


class BatchReader(Dataset):
    """Dataset that wraps any dataset for a DataLoader: it reads whole batches and checks them.

    Args:
        dataset: Dataset with `__getitem__`, or with `__getitems__` for several samples at once.
        name: Config key of the dataset, for error messages.
        n_positions: Number of positions T that every sample must have, unless the dataset stacks
            its batches itself. With None, samples may have any form as long as the samples of one
            batch have equal shapes.
        vocab_size: Number of token ids V of the net. With `n_positions`, tokens and targets must be
            below it. None does not check them.
    """

    def __init__(
        self,
        dataset: Dataset,
        name: str = "data",
        n_positions: int | None = None,
        vocab_size: int | None = None,
    ):
        self.dataset = dataset
        self.name = name
        self.n_positions = n_positions
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len_of(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Read the samples of a batch and return them as a tuple or a dict of stacked tensors.

        Samples of text give (tokens (B, T), targets (B, T)). A batch that the dataset has stacked
        itself in its `__getitems__` is returned unchanged. Only its ids are checked.

        Args:
            indices: Indices of the samples. An index i < 0 makes a batch of sample -1 - i whose
                targets are all -100: `EvalBatches` gives such an index to a rank that has no sample
                while other ranks have a sample.

        Raises:
            DataError: If samples cannot be stacked, do not have `n_positions` positions, or have an
                id outside of 0 to `vocab_size` - 1. A target may also be -100. Ids on a GPU are not
                checked. The message names the first such sample.
        """
        if indices[0] < 0:
            tokens, targets, *documents = self.__getitems__([-1 - indices[0]])
            return tokens, torch.full_like(targets, IGNORED), *documents
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if read else [self.dataset[index] for index in indices]
        try:
            batch = collate(samples)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            shapes = [describe_sample(sample) for sample in samples]
            odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), 0)
            reason = f"sample {indices[0]} is {shapes[0]}" if odd else "torch cannot stack it"
            raise self._stacking_error(indices[odd], samples[odd], reason) from error
        if self.n_positions is not None:
            if isinstance(samples, list) and batch[0].shape[1] != self.n_positions:
                reason = f"sample 0 has {self.n_positions} positions"
                raise self._stacking_error(indices[0], samples[0], reason)
            self._check_ids(indices, batch)
        return batch

    def _check_ids(self, indices: Sequence[int], batch: tuple[Tensor, ...]) -> None:
        """Check that the net knows all token ids of a batch. Batches on a GPU are not checked.

        On a GPU, an unknown id would end the run in a device-side assertion that names no sample.

        Args:
            indices: Indices of the samples.
            batch: Tokens and targets, (B, T) each.

        Raises:
            DataError: If an id is negative or not below `vocab_size`. A target may be -100.
        """
        if self.vocab_size is None:
            return
        for kind, tensor in zip(("token", "target"), batch[:2], strict=True):
            if tensor.device.type != "cpu":
                return  # reading the values would wait for the device
            ids = tensor.numpy()
            is_valid = (ids >= 0) & (ids < self.vocab_size)
            if kind == "target":
                is_valid |= ids == IGNORED
            if is_valid.all():
                continue
            row, position = np.argwhere(~is_valid)[0]
            also = f" and {IGNORED}" if kind == "target" else ""
            raise DataError(
                f"{self.name}: sample {indices[row]} has the {kind} {int(ids[row, position])}; "
                f"allowed: 0 to {self.vocab_size - 1}{also} (model.vocab_size={self.vocab_size})"
            )

    def _stacking_error(self, index: int, sample: Any, reason: str) -> DataError:
        """Return the error about a sample that cannot be stacked with the others of its batch.

        The error is not raised here.

        Args:
            index: Index of the sample in the dataset.
            sample: The sample, whose types and shapes the message shows.
            reason: Reason, which follows "but" in the message.
        """
        return DataError(
            f"{self.name}: sample {index} is {describe_sample(sample)}, but {reason}; needed: "
            "tensors of equal shape in all samples, for example padded, with targets of -100 in "
            "the padding"
        )


def describe_sample(sample: Any) -> str:
    """Return the types and shapes of a sample, for an error message.

    For example "(int64 (128,), int64 (128,))" for a pair of tensors. Of a dict, a tuple or a list
    only the first 8 items are described. A list without tensors gives its length, and any other
    value the name of its type.

    Args:
        sample: Value of any type.
    """
    if isinstance(sample, Tensor | np.ndarray):
        return f"{str(sample.dtype).removeprefix('torch.')} {tuple(sample.shape)}"
    if isinstance(sample, Mapping):
        items = [f"{key}: {describe_sample(sample[key])}" for key in list(sample)[:SHOWN_KEYS]]
        return "{" + ", ".join(items) + "}"
    if isinstance(sample, tuple):
        return f"({', '.join(describe_sample(item) for item in sample[:SHOWN_KEYS])})"
    if isinstance(sample, list):
        holds_tensors = any(isinstance(item, Tensor | np.ndarray) for item in sample)
        shown = ", ".join(describe_sample(item) for item in sample[:SHOWN_KEYS])
        return f"[{shown}]" if holds_tensors else f"list of {len(sample)}"
    return type(sample).__name__


def collate(batch: Any) -> Any:
    """Stack a list of samples with torch's `default_collate`.

    Samples that are tuples or lists become a tuple of stacked tensors, and dicts a dict of them.

    Args:
        batch: List of samples. Any other value is a batch that is stacked already, and is returned
            unchanged.

    Raises:
        RuntimeError, TypeError, KeyError: If torch cannot stack the samples, for example because
            their shapes differ.
    """
    batch = default_collate(batch) if isinstance(batch, list) else batch
    return tuple(batch) if isinstance(batch, list) else batch


def pack_samples(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Decide which documents share a sample, so that few positions of the samples stay empty.

    The longest document is placed first, each into the fullest sample that has space for it.

    Args:
        lengths: Number of positions of each document, at most `size`.
        size: Number of positions of a sample.

    Returns:
        For each sample, the indices of its documents in `lengths`.
    """
    packed: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free positions, index of the packed sample), sorted
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, (lengths[item], 0))
        if place == len(spaces):
            spaces.append((size, len(packed)))
            packed.append([])
        space, number = spaces.pop(place)
        packed[number].append(item)
        insort(spaces, (space - lengths[item], number))
    return packed


def has_documents(batch: Any) -> bool:
    """Return whether a batch or a sample is a tuple (tokens, targets, documents).

    `documents` is the index of the document of each token. The three items must be int64 tensors of
    one shape.

    Args:
        batch: Batch or sample of any type.
    """
    if not isinstance(batch, tuple) or len(batch) != 3:
        return False
    items = [item for item in batch if isinstance(item, Tensor) and item.dtype == torch.int64]
    return len(items) == 3 and items[0].shape == items[1].shape == items[2].shape


def find_targets(batch: Any) -> Tensor | None:
    """Return the targets of a batch, or None for a batch of unknown form.

    They are known for a pair (tokens, targets) with integer targets, for a tuple (tokens, targets,
    documents), and for a dict with integer `targets` or, without these, `labels`.

    Args:
        batch: Batch of a data loader.
    """
    if isinstance(batch, Mapping):
        targets = batch.get("targets" if "targets" in batch else "labels")
    else:
        is_pair = type(batch) is tuple and (len(batch) == 2 or has_documents(batch))
        targets = batch[1] if is_pair else None
    return targets if isinstance(targets, Tensor) and not targets.is_floating_point() else None


def count_batch_targets(batch: Any) -> int | None:
    """Return the number of targets of a batch that are not -100, or None if they are unknown."""
    targets = find_targets(batch)
    return None if targets is None else int((targets != IGNORED).sum())
