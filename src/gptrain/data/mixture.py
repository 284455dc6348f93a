"""Mixture: a dataset that mixes the samples of several datasets, its parts, in given shares.

# T positions of a sample
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from gptrain.core.errors import DataError
from gptrain.data.order import MixtureOrder
from gptrain.data.samples import as_pairs, has_documents


class Mixture(ConcatDataset):
    """Concatenation of several datasets, the parts, for a training that mixes them.

    `order` returns the order in which training mixes the samples of the parts. An evaluation reads
    the parts separately.

    Args:
        parts: Dataset of each part by name. Samples are pairs (tokens (T,), targets (T,)) or dicts
            of Hugging Face, with the same T in all parts. Samples of some parts may have a third
            item, the index of each token's document. A sample of the other parts then counts as one
            document.
        weights: Share of the samples of each part by name, relative to the sum of all weights.

    Attributes:
        tokenizer: Tokenizer of the parts that have a tokenizer. None if no part has a tokenizer.
        token_bytes: Bytes of text per token, (V,), if all parts have the same values. None
            otherwise.
        end_id: Id of the token that ends a document, if it is the same in all parts. None
            otherwise.

    Raises:
        DataError: If there is no part, or if two parts have different tokenizers.
        KeyError, IndexError: If a part has no weight, or no sample.
    """

    def __init__(self, parts: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        if not parts:
            raise DataError("a mixture of no parts; try: data@data.parts.<name>=text")
        self.parts = {name: as_pairs(part, f"part {name}") for name, part in parts.items()}
        super().__init__(self.parts.values())
        self.weights = {name: weights[name] / sum(weights.values()) for name in parts}
        self.lengths = {name: len(part) for name, part in self.parts.items()}
        self._is_masked = any(has_documents(part[0]) for part in self.parts.values())
        tokenizers = [getattr(part, "tokenizer", None) for part in self.parts.values()]
        known = {tokenizer.identity: tokenizer for tokenizer in tokenizers if tokenizer}
        if len(known) > 1:
            raise DataError("parts have different tokenizers; give all of them the same file")
        self.tokenizer = next(iter(known.values()), None)
        self.token_bytes = self._common("token_bytes")
        self.end_id = self._common("end_id")

    def _common(self, attribute: str) -> Any:
        """Return the value of an attribute of the parts if it is the same in all, or None."""
        values: list[Any] = [getattr(part, attribute, None) for part in self.parts.values()]
        is_same = all(np.array_equal(value, values[0]) for value in values)
        return values[0] if is_same else None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the name, the share, the length and the fingerprint of each part."""
        facts = [
            (name, self.weights[name], self.lengths[name], getattr(part, "fingerprint", None))
            for name, part in self.parts.items()
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def __getitem__(self, idx: int) -> tuple[Tensor, ...]:
        """Return one sample: tokens (T,) and targets (T,), int64.

        If a part has documents, the third item is the index of the document of each token, (T,).
        """
        sample = super().__getitem__(idx)
        if self._is_masked and len(sample) == 2:
            return (*sample, torch.zeros_like(sample[0]))
        return sample

    def order(self, seed: int) -> MixtureOrder:
        """Return the order in which training reads the samples."""
        return MixtureOrder(self.lengths, self.weights, seed)

    def describe(self, n_samples: int = 0) -> str:
        """Return one line for all parts: the share, then the part's own `describe`.

        A part without `describe` has its length and its epochs in a run of `n_samples`.
        """
        words = []
        for name, part in self.parts.items():
            count, length = round(n_samples * self.weights[name]), self.lengths[name]
            default = f"{length:,} samples · {count / length:.3g} epochs"
            text = part.describe(count) if hasattr(part, "describe") else default
            words.append(f"{name} {self.weights[name]:.3g}: {text}")
        return " | ".join(words)
