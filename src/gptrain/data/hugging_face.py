"""Conversion of samples in Hugging Face's form, dicts of `input_ids` and `labels`, to pairs.

A pair is (tokens, targets), the form of the samples that gptrain trains on.

# T positions of a sample
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.core.errors import DataError
from gptrain.data.samples import describe_sample, len_of, take_over_attributes
from gptrain.loss import IGNORED

REQUIRED_KEYS = {"input_ids", "labels"}
MASK_KEY = "attention_mask"


class HuggingFacePairs(Dataset):
    """Dataset of pairs (tokens (T,), targets (T,)) that reads a Hugging Face dataset of dicts.

    Labels of Hugging Face are not shifted: labels[t] is input_ids[t], or -100, and the models of
    transformers predict labels[t + 1] from input_ids[:t + 1]. The pairs are shifted: targets[t] is
    labels[t + 1], and the last target is -100. Both losses are then the mean over the same T - 1
    predictions. Reading a sample that cannot be converted raises a DataError (see `pair_of`).

    Args:
        dataset: Dataset whose samples are dicts of `input_ids`, `labels` and, optionally,
            `attention_mask`, each a tensor, an array or a list of T integers.
        name: Config key of the dataset, for error messages.
    """

    def __init__(self, dataset: Dataset, name: str):
        self.dataset = dataset
        self.name = name
        take_over_attributes(self, dataset)

    def __len__(self) -> int:
        return len_of(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._to_pair(index, self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs (tokens (T,), targets (T,)) of several samples as a list.

        Args:
            indices: Indices of the samples.

        Raises:
            DataError: If a sample cannot be converted. The message names the sample.
        """
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if read else [self.dataset[index] for index in indices]
        return [self._to_pair(i, sample) for i, sample in zip(indices, samples, strict=True)]

    def _to_pair(self, index: int, sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Convert one sample to a pair (tokens (T,), targets (T,)), and name it in an error.

        Args:
            index: Index of the sample, for the error message.
            sample: Dict of `input_ids` and `labels`.

        Raises:
            DataError: If the sample cannot be converted.
        """
        try:
            return pair_of(sample)
        except ValueError as error:
            raise DataError(f"{self.name}: sample {index}: {error}") from error


def as_pairs(dataset: Dataset, name: str) -> Dataset:
    """Return a dataset as a dataset of pairs if its samples are dicts of `input_ids` and `labels`.

    Only the first sample is read to find out. Any other dataset is returned unchanged, also an
    empty one. Warns about keys of this sample that are not used.

    Args:
        dataset: Dataset of dicts or of any other samples.
        name: Config key of the dataset, for error messages.
    """
    sample = dataset[0] if len_of(dataset) else None
    if not isinstance(sample, Mapping) or not sample.keys() >= REQUIRED_KEYS:
        return dataset
    if unused := sorted(map(str, sample.keys() - REQUIRED_KEYS - {MASK_KEY})):
        keys = "key is" if len(unused) == 1 else "keys are"
        warnings.warn(f"{name}: {keys} not used: {', '.join(unused)}", stacklevel=2)
    return HuggingFacePairs(dataset, name)


def pair_of(sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the tokens (T,) and the targets (T,) of one dict, both int64.

    targets[t] is labels[t + 1], and the last target is -100. A label at a position whose
    `attention_mask` is 0 counts as -100, whatever it is.

    Other keys, such as `idx` or `text`, are not used. But another key with one value per position,
    such as `position_ids`, is an error, because it could change what the net should compute.

    Args:
        sample: Dict of `input_ids`, `labels` and, optionally, `attention_mask`, each a tensor, an
            array or a list of T integers.

    Raises:
        ValueError: If a required key is missing, if another key has a value per position, if the
            values are not integers of one shape (T,), if a label that is not masked is neither its
            input id nor -100, or if `attention_mask` has a 0 before a 1.
    """
    if not isinstance(sample, Mapping) or not sample.keys() >= REQUIRED_KEYS:
        raise ValueError(f"{describe_sample(sample)}; needed: a dict of input_ids and labels")
    n_positions = n_items(sample["input_ids"])
    others = sample.keys() - REQUIRED_KEYS - {MASK_KEY}
    if unknown := sorted(str(key) for key in others if n_items(sample[key]) == n_positions):
        raise ValueError(
            f"{', '.join(unknown)}: unknown key; needed: a dict of input_ids, labels and, "
            f"optionally, attention_mask; try: dataset.remove_columns({unknown})"
        )
    try:
        columns = {key: torch.as_tensor(sample[key]) for key in sample.keys() - others}
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{describe_sample(sample)}; needed: flat sequences of integers") from None
    shapes = {tuple(column.shape) for column in columns.values()}
    is_float = any(column.is_floating_point() for column in columns.values())
    if len(shapes) != 1 or columns["labels"].ndim != 1 or is_float:
        raise ValueError(f"{describe_sample(columns)}; needed: integers of one shape (T,)")
    tokens = columns["input_ids"].long()  # (T,)
    labels = columns["labels"].long()  # (T,)
    if MASK_KEY in columns:
        mask = columns[MASK_KEY].bool()
        if not torch.equal(mask, mask.cummin(0).values):
            raise ValueError(
                "attention_mask has a 0 before a 1: a causal net would attend to the padding; "
                "needed: padding on the right (padding_side='right')"
            )
        labels = labels.masked_fill(~mask, IGNORED)
    differs = (labels != IGNORED) & (labels != tokens)
    if differs.any():
        position = int(differs.nonzero()[0])
        raise ValueError(
            f"labels[{position}]={int(labels[position])}, "
            f"input_ids[{position}]={int(tokens[position])}; "
            "needed: labels that are input_ids or -100, not shifted, as models of transformers "
            "take them; targets that are already shifted need a pair (tokens, targets)"
        )
    return tokens, torch.cat((labels[1:], labels.new_full((1,), IGNORED)))


def n_items(value: Any) -> int | None:
    """Return the length of a list, an array or a tensor, or None for any value without items.

    A text counts as a value without items.
    """
    is_scalar = isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0
    return None if is_scalar or not hasattr(value, "__len__") else len(value)
