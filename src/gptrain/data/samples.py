"""From samples to batches: whole batches at once, padding that no loss counts, stacking.

# B batch, T positions of a sample
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from gptrain.loss import IGNORED


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


class PaddedDataset(Dataset):
    """A data set in which index -1 is sample 0, so that all ranks have equally many samples.

    Where a sample is a pair, or a dict with `targets` or `labels`, and these are integers, they
    become -100 and no loss counts them. Other samples are counted once more, as in torch's
    DistributedSampler.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len_of(self.dataset)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A batch, as `collate` makes it."""
        real = [max(index, 0) for index in indices]
        if read := getattr(self.dataset, "__getitems__", None):  # a whole batch, or a list
            batch = collate(read(real))
        else:
            batch = collate([self.dataset[index] for index in real])
        padding = torch.tensor(indices) < 0  # (B,)
        return _ignore_targets(batch, padding) if padding.any() else batch


def collate(batch: Any) -> Any:
    """torch's `default_collate` for a list of samples; what is a batch already passes."""
    batch = default_collate(batch) if isinstance(batch, list) else batch
    return tuple(batch) if isinstance(batch, list) else batch


def count_batch_targets(batch: Any) -> int:
    """Targets that a loss counts in a batch; 0 where none are known."""
    key = _key_of_targets(batch)
    return 0 if key is None else int((batch[key] != IGNORED).sum())


def _ignore_targets(batch: Any, padding: Tensor) -> Any:
    key = _key_of_targets(batch)
    if key is None:
        return batch
    ignored = batch[key].masked_fill(padding.view(-1, *[1] * (batch[key].ndim - 1)), IGNORED)
    return {**batch, key: ignored} if isinstance(batch, Mapping) else (batch[0], ignored)


def _key_of_targets(batch: Any) -> str | int | None:
    if isinstance(batch, Mapping):
        key = "targets" if "targets" in batch else "labels"
        targets = batch.get(key)
    else:
        key, targets = 1, batch[1] if type(batch) is tuple and len(batch) == 2 else None
    return key if isinstance(targets, Tensor) and not targets.is_floating_point() else None
