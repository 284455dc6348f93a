"""Samples as Hugging Face's tools make them, `{input_ids, labels}`, as pairs (tokens, targets).

# T positions of a sample
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.core.small_files import DataError
from gptrain.data.samples import describe, len_of
from gptrain.loss import IGNORED

NEEDED = {"input_ids", "labels"}
OPTIONAL_ATTRIBUTES = ("about", "fingerprint", "token_bytes", "tokenizer")  # of a data set


class HuggingFacePairs(Dataset):
    """Pairs (tokens (T,), targets (T,)) of a data set of dicts.

    Hugging Face's labels are not shifted: labels[t] is input_ids[t], or -100, and its models
    predict labels[t + 1] from input_ids[:t + 1]. Here targets[t] = labels[t + 1], and the last
    target is -100, so that both losses are the mean over the same T - 1 predictions.

    Args:
        dataset: Data set whose samples are dicts of `input_ids`, `labels` and, optionally,
            `attention_mask`, each a tensor, an array or a list of T integers.
        name: Config key of the data set, for error messages.
    """

    def __init__(self, dataset: Dataset, name: str):
        self.dataset, self.name = dataset, name
        for attribute in OPTIONAL_ATTRIBUTES:
            if hasattr(dataset, attribute):
                setattr(self, attribute, getattr(dataset, attribute))

    def __len__(self) -> int:
        return len_of(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pair(index, self.dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if read else [self.dataset[index] for index in indices]
        return [self._pair(index, one) for index, one in zip(indices, samples, strict=True)]

    def _pair(self, index: int, sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        try:
            return pair_of(sample)
        except ValueError as error:
            raise DataError(f"{self.name}: sample {index}: {error}") from error


def as_pairs(dataset: Dataset, name: str) -> Dataset:
    """Return a data set of pairs if the first sample is a dict of Hugging Face's form.

    Any other data set is returned as it is.
    """
    sample = dataset[0] if len_of(dataset) else None
    is_theirs = isinstance(sample, Mapping) and sample.keys() >= NEEDED
    return HuggingFacePairs(dataset, name) if is_theirs else dataset


def pair_of(sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return tokens (T,) and targets (T,), int64, of one dict.

    Raises:
        ValueError: If a key is missing or unknown, if shapes differ, if labels are something else
            than input_ids or -100, or if the mask leaves out positions before the last that it has.
    """
    if not isinstance(sample, Mapping) or not sample.keys() >= NEEDED:
        raise ValueError(f"{describe(sample)}; needed: a dict of input_ids and labels")
    if unknown := sorted(map(str, sample.keys() - NEEDED - {"attention_mask"})):
        raise ValueError(
            f"{', '.join(unknown)}: nothing reads this; "
            "needed: a dict of input_ids, labels and, optionally, attention_mask"
        )
    try:
        columns = {key: torch.as_tensor(sample[key]) for key in sample}
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{describe(sample)}; needed: flat sequences of integers") from None
    shapes = {tuple(column.shape) for column in columns.values()}
    is_float = any(column.is_floating_point() for column in columns.values())
    if len(shapes) != 1 or columns["labels"].ndim != 1 or is_float:
        raise ValueError(f"{describe(columns)}; needed: integers of one shape (T,)")
    tokens, labels = columns["input_ids"].long(), columns["labels"].long()  # (T,), (T,)
    if "attention_mask" in columns:
        mask = columns["attention_mask"].bool()
        if not torch.equal(mask, mask.cummin(0).values):
            raise ValueError(
                "attention_mask has a 0 before a 1: a causal net would attend to the padding; "
                "needed: padding on the right (padding_side='right')"
            )
        labels = labels.masked_fill(~mask, IGNORED)
    differs = (labels != IGNORED) & (labels != tokens)
    if differs.any():
        place = int(differs.nonzero()[0])
        raise ValueError(
            f"labels[{place}]={int(labels[place])}, input_ids[{place}]={int(tokens[place])}; "
            "needed: labels that are input_ids or -100, not shifted, as models of transformers "
            "take them; targets that are shifted already come as a pair (tokens, targets)"
        )
    return tokens, torch.cat((labels[1:], labels.new_full((1,), IGNORED)))
