"""From samples to batches: samples are read, stacked, and named where they do not fit.

# B batch, T positions of a sample
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from gptrain.core.small_files import DataError
from gptrain.loss import IGNORED

SHOWN_KEYS = 8  # keys of a dict, or items of a tuple, that an error message shows


def len_of(dataset: Dataset) -> int:
    """Samples of a data set, whose class in torch declares none."""
    return len(cast(Sized, dataset))


class BatchDataset(Dataset):
    """A data set that makes whole batches, by `__getitems__`; a sample is a batch of one."""

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch: tokens (B, T) and targets (B, T), int64."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: tokens (T,) and targets (T,), int64."""
        n_samples = len_of(self)
        if not -n_samples <= index < n_samples:
            raise IndexError(f"sample {index}: there are {n_samples}")
        tokens, targets = self.__getitems__([index % n_samples])
        return tokens[0], targets[0]


class BatchReader(Dataset):
    """Reads the samples of a batch from a data set and stacks them.

    Args:
        dataset: Data set with `__getitem__`, or with `__getitems__` for several samples at once.
        name: Config key of the data set, for error messages.
        n_positions: T of every sample of token sequences. None allows samples of any form, as long
            as those of one batch have equal shapes.
    """

    def __init__(self, dataset: Dataset, name: str = "data", n_positions: int | None = None):
        self.dataset, self.name, self.n_positions = dataset, name, n_positions

    def __len__(self) -> int:
        return len_of(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return a batch as `collate` makes it.

        An index i < 0 makes a batch of sample -1 - i whose targets are all -100: `EvalBatches`
        gives it to a rank that has no sample where other ranks have some.

        Raises:
            DataError: If samples cannot be stacked. The message names the first that differs.
        """
        if indices[0] < 0:
            tokens, targets = self.__getitems__([-1 - indices[0]])
            return tokens, torch.full_like(targets, IGNORED)
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if read else [self.dataset[index] for index in indices]
        if not isinstance(samples, list):  # the data set has stacked them itself
            return collate(samples)
        try:
            batch = collate(samples)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            shapes = [describe(sample) for sample in samples]
            odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), 0)
            if odd:
                other = f"sample {indices[0]} is {shapes[0]}"
                raise self._unfit(indices[odd], samples[odd], other) from error
            raise self._unfit(indices[0], samples[0], "torch cannot stack it") from error
        if self.n_positions is not None and batch[0].shape[1] != self.n_positions:
            raise self._unfit(indices[0], samples[0], f"sample 0 has {self.n_positions} positions")
        return batch

    def _unfit(self, index: int, sample: Any, but: str) -> DataError:
        return DataError(
            f"{self.name}: sample {index} is {describe(sample)}, but {but}; needed: tensors of "
            "equal shape in all samples, for example padded, with targets of -100 there"
        )


def describe(sample: Any) -> str:
    """Return the types and shapes of a sample, for an error message."""
    if isinstance(sample, Tensor | np.ndarray):
        return f"{str(sample.dtype).removeprefix('torch.')} {tuple(sample.shape)}"
    if isinstance(sample, Mapping):
        items = [f"{key}: {describe(sample[key])}" for key in list(sample)[:SHOWN_KEYS]]
        return "{" + ", ".join(items) + "}"
    if isinstance(sample, tuple):
        return f"({', '.join(describe(item) for item in sample[:SHOWN_KEYS])})"
    if isinstance(sample, list):
        holds_tensors = any(isinstance(item, Tensor | np.ndarray) for item in sample)
        shown = ", ".join(describe(item) for item in sample[:SHOWN_KEYS])
        return f"[{shown}]" if holds_tensors else f"list of {len(sample)}"
    return type(sample).__name__


def collate(batch: Any) -> Any:
    """torch's `default_collate` for a list of samples; what is a batch already passes."""
    batch = default_collate(batch) if isinstance(batch, list) else batch
    return tuple(batch) if isinstance(batch, list) else batch


def count_batch_targets(batch: Any) -> int | None:
    """Return how many targets of a batch a loss counts, or None if they are not known.

    Known are integer targets of a pair, or of a dict with `targets` or `labels`.
    """
    if isinstance(batch, Mapping):
        targets = batch.get("targets" if "targets" in batch else "labels")
    else:
        targets = batch[1] if type(batch) is tuple and len(batch) == 2 else None
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    return int((targets != IGNORED).sum())
