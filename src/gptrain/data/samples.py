"""How samples are read from any dataset, stacked to batches and checked.

# B batch, T positions of a sample
"""

import hashlib
import random
import warnings
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from gptrain.core.errors import DataError, first_line
from gptrain.loss import IGNORED

REQUIRED_KEYS = {"input_ids", "labels"}


class BatchDataset(Dataset, Sized):
    """Base class of datasets that read a whole batch at once, in their method `__getitems__`."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return a batch: tokens (B, T) and targets (B, T), int64.

        If samples hold several documents that must not see each other, the third item is the index
        of the document of each token, (B, T), int64.
        """
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return one sample: tokens (T,), targets (T,) and, if batches have it, a third item."""
        index = range(len(self))[index]
        return tuple(item[0] for item in self.__getitems__([index]))


@dataclass(eq=False)
class Samples(Dataset):
    """Samples of a user's dataset by index. Other attributes are those of the dataset.

    Args:
        dataset: The dataset, or a stream.
        name: Config key of the dataset, for error messages.
        samples: The samples that were read from a stream. None: the dataset has an index.

    Attributes:
        are_dicts: Whether the samples are dicts of Hugging Face, which are returned as pairs.
    """

    dataset: Any = None  # an object that is unpickled has no attribute of its own yet
    name: str = "data"
    samples: Any = field(default=None, kw_only=True)
    are_dicts: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.samples = self.dataset if self.samples is None else self.samples

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.dataset, attribute)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.in_form(self.samples[index], index)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return several samples: a list, or a batch that the dataset stacks itself."""
        read = getattr(self.samples, "__getitems__", None)
        samples = read(indices) if read else [self.samples[index] for index in indices]
        if not self.are_dicts:
            return samples
        return [self.in_form(*pair) for pair in zip(samples, indices, strict=True)]

    def in_form(self, sample: Any, index: int) -> Any:
        """Return a sample as a pair (tokens, targets) if it is a dict of Hugging Face."""
        return pair_of(sample, f"{self.name}: sample {index}") if self.are_dicts else sample


@dataclass(eq=False)
class BatchReader(Samples):
    """Dataset for a DataLoader that reads whole batches and checks them.

    Args:
        dataset: Dataset with `__getitem__`, or with `__getitems__` for several samples at once.
        name: Config key of the dataset, for error messages.
        n_positions: Number of positions T of every sample. None: any form that can be stacked.
        vocab_size: Number of token ids V. With `n_positions`, tokens must be from 0 to V - 1, and
            targets as well, or -100. None: not checked.
        seed: Seed of the random numbers that the dataset draws in a data worker, which depend on it
            and on the place of the batch in the run only.
    """

    n_positions: int | None = None
    vocab_size: int | None = None
    seed: int = 0

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the samples of a batch as a tuple or a dict of stacked tensors.

        `[-1 - i]` is sample i with all targets -100, for samples with `n_positions`. Raises a
        DataError if the samples cannot be stacked or do not pass a check.
        """
        if indices[0] < 0:
            if self.n_positions is None:  # a step of a user may read -100 as a value
                raise DataError(f"{self.name}: fewer samples than ranks that read them")
            tokens, targets, *documents = self.__getitems__([-1 - indices[0]])
            return tokens, torch.full_like(targets, IGNORED), *documents
        if get_worker_info() is not None:
            seed_all(f"{self.seed} {getattr(indices, 'place', indices)}")
        samples = super().__getitems__(indices)
        try:
            batch = collate(samples)
            if self.n_positions is not None:
                self._check(*batch[:2])
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise DataError(f"{self.name}: samples {indices}: {first_line(error)}") from error
        return batch

    def _check(self, tokens: Tensor, targets: Tensor) -> None:
        """Raise a ValueError if a batch has another T or an id outside of the vocabulary."""
        if tokens.shape[1] != self.n_positions:
            raise ValueError(f"{tokens.shape[1]} positions, but sample 0 has {self.n_positions}")
        ids, wanted = tokens.numpy(force=True), targets.numpy(force=True)
        wanted = np.where(wanted == IGNORED, 0, wanted)
        for number in max(ids.max(), wanted.max()), min(ids.min(), wanted.min()):
            # On a GPU, the net would end in an assertion.
            if self.vocab_size is not None and not 0 <= number < self.vocab_size:
                raise ValueError(f"token {number} is outside of model.vocab_size={self.vocab_size}")


def collate(batch: Any) -> Any:
    """Stack a list of samples with torch's `default_collate`: tuples to a tuple, dicts to a dict.

    Any other value is a batch that is stacked already, and is returned unchanged.
    """
    batch = default_collate(batch) if isinstance(batch, list) else batch
    return tuple(batch) if isinstance(batch, list) else batch


def as_pairs(dataset: Any, name: str) -> Any:
    """Return a dataset as a dataset of pairs if its samples are dicts of `input_ids` and `labels`.

    Only the first sample is read to find out. Any other dataset is returned unchanged, also an
    empty one. Warns about keys of this sample that are not used; `name` begins the messages.
    """
    sample = dataset[0] if len(dataset) else None
    if not isinstance(sample, Mapping) or not sample.keys() >= REQUIRED_KEYS:
        return dataset
    if unused := sorted(map(str, sample.keys() - REQUIRED_KEYS - {"attention_mask"})):
        warnings.warn(f"{name}: not used: {', '.join(unused)}", stacklevel=2)
    pairs = dataset if isinstance(dataset, Samples) else Samples(dataset, name)
    pairs.are_dicts = True
    return pairs


def pair_of(sample: Mapping[str, Any], place: str = "sample") -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (T,) int64, of a dict of Hugging Face.

    `labels[t]` must be `input_ids[t]`, or -100 where no loss is counted, as where `attention_mask`
    is 0. Raises a DataError, which begins with `place`, for another form, labels that are shifted
    and padding on the left.
    """
    try:
        tokens, labels = (torch.as_tensor(sample[key]).long() for key in ("input_ids", "labels"))
        mask = torch.as_tensor(sample.get("attention_mask", torch.ones_like(tokens))).bool()
        targets = torch.where(mask, labels, IGNORED)
        is_other = (targets != IGNORED) & (targets != tokens)
        shifted = torch.cat((targets[1:], targets.new_full((1,), IGNORED)))
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        message = f"{first_line(error)}; needed: a dict of input_ids and labels, integers (T,)"
        raise DataError(f"{place}: {message}") from None
    if not torch.equal(mask, mask.cummin(0).values):
        raise DataError(f"{place}: attention_mask has a 0 before a 1; try: padding_side='right'")
    if is_other.any():
        t = int(is_other.nonzero()[0])
        found = f"labels[{t}]={int(targets[t])}, input_ids[{t}]={int(tokens[t])}"
        raise DataError(f"{place}: {found}; needed: labels that are input_ids or -100, not shifted")
    return tokens, shifted


def seed_all(text: str) -> None:
    """Seed the random generators of Python, NumPy and torch's CPU with a hash of a text."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)  # torch.manual_seed would take 0.1 ms


def has_documents(batch: Any) -> bool:
    """Return whether a batch or a sample is a tuple (tokens, targets, documents), all int64.

    `documents` is the index of the document of each token. The three have one shape.
    """
    parts = batch if isinstance(batch, tuple) else ()
    items = [item for item in parts if isinstance(item, Tensor) and item.dtype == torch.int64]
    return len(items) == len(parts) == 3 and items[0].shape == items[1].shape == items[2].shape


def find_targets(batch: Any) -> Tensor | None:
    """Return the targets of a batch, or None for a batch of unknown form.

    They are known for a pair (tokens, targets) with integer targets, for a tuple (tokens, targets,
    documents), and for a dict with integer `targets` or, without these, `labels`.
    """
    if isinstance(batch, Mapping):
        targets = batch.get("targets" if "targets" in batch else "labels")
    else:
        is_pair = type(batch) is tuple and (len(batch) == 2 or has_documents(batch))
        targets = batch[1] if is_pair else None
    return targets if isinstance(targets, Tensor) and not targets.is_floating_point() else None
