"""A mixture reads its parts in the given shares, each through epochs of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from gptrain.data import (
    BatchReader,
    DataError,
    DummyTextDataset,
    EvalBatches,
    Mixture,
    MixtureOrder,
    TokenDataset,
    load_tokenizer,
)


def part(n_samples: int, seq_len: int = 9, seed: int = 0) -> DummyTextDataset:
    return DummyTextDataset(n_samples, seq_len, vocab_size=100, seed=seed)


def mixture(weights: dict[str, float], **lengths: int) -> Mixture:
    return Mixture({name: part(n, seed=n) for name, n in lengths.items()}, weights)


def owners(mixture: Mixture, samples: np.ndarray) -> np.ndarray:
    return np.searchsorted(mixture.cumulative_sizes, samples, side="right")


@pytest.mark.parametrize(
    "weights", [{"a": 1, "b": 1}, {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 3, "b": 97, "c": 0.01}]
)
def test_shares_hold_in_any_window_of_a_thousand(weights):
    mixed = mixture(weights, **dict.fromkeys(weights, 40_000))
    order, total = mixed.order(seed=7), sum(weights.values())
    of_parts = owners(mixed, order.index(np.arange(2 * 2**15)))  # a full cycle
    for number, weight in enumerate(weights.values()):
        done = np.cumsum([0, *(of_parts == number)])
        shares = (done[1000:] - done[:-1000]) / 1000
        assert abs(shares - weight / total).max() <= 0.01


def test_each_part_goes_through_epochs_of_its_own():
    mixed = mixture({"a": 3, "b": 1}, a=30, b=50)
    order = mixed.order(seed=7)
    samples = order.index(np.arange(400))
    assert np.bincount(owners(mixed, samples)).tolist() == [300, 100]
    a, b = samples[samples < 30], samples[samples >= 30]
    for own, n_samples in ((a, 30), (b, 50)):
        epochs = own.reshape(-1, n_samples)  # 10 and 2 of them
        assert all(Counter(Counter(epoch).values()) == {1: n_samples} for epoch in epochs.tolist())
        assert epochs[0].tolist() != epochs[1].tolist()
    assert mixed.describe(400).count("10 epochs") == mixed.describe(400).count(" 2 epochs") == 1
    mixed.parts["b"].describe = lambda n_samples: f"{n_samples} read"
    assert mixed.describe(400) == "a 0.75: 30 samples · 10 epochs | b 0.25: 100 read"


def test_the_order_of_a_mixture_is_the_same_in_every_version():
    """A run that is resumed by a later version of the library reads the samples that are left."""
    order = MixtureOrder({"a": 5, "b": 3}, {"a": 0.75, "b": 0.25}, seed=3)
    assert order.index(np.arange(8, 16)).tolist() == [1, 4, 7, 0, 3, 2, 6, 3]


def test_the_samples_of_a_part_do_not_depend_on_the_place_of_its_name_in_the_config():
    first, second = mixture({"a": 1, "b": 2}, a=30, b=50), mixture({"b": 2, "a": 1}, b=50, a=30)
    first_samples, second_samples = (m.order(7).index(np.arange(80)) for m in (first, second))
    pairs = ((first, first_samples), (second, second_samples))
    for name in ("a", "b"):
        read = []
        for mixed, samples in pairs:
            number = [*mixed.parts].index(name)
            first = [0, *mixed.cumulative_sizes][number]
            read.append((samples[owners(mixed, samples) == number] - first).tolist())
        assert read[0] == read[1]


def test_a_batch_has_the_samples_of_its_parts():
    mixed = mixture({"a": 1, "b": 1}, a=30, b=50)
    tokens, targets = BatchReader(mixed).__getitems__([79, 0, 30, 29])
    for row, (name, index) in enumerate([("b", 49), ("a", 0), ("b", 0), ("a", 29)]):
        expected = mixed.parts[name][index]
        assert tokens[row].equal(expected[0]) and targets[row].equal(expected[1])
    masked: Any = [(*sample, torch.arange(8) // 4) for sample in map(part(5).__getitem__, range(5))]
    mixed = Mixture({"a": part(5), "b": masked}, {"a": 1, "b": 1})
    _, _, documents = BatchReader(mixed).__getitems__([7, 0])
    assert documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0] * 8]
    dicts: Any = [{"input_ids": [*range(n, n + 8)], "labels": [*range(n, n + 8)]} for n in (5, 6)]
    mixed = Mixture({"a": part(5), "b": dicts}, {"a": 1, "b": 1})  # samples of Hugging Face
    tokens, targets = BatchReader(mixed).__getitems__([6, 0])
    assert tokens[0].tolist() == [*range(6, 14)] and targets[0].tolist() == [*range(7, 14), -100]
    broken: Any = [*dicts, dicts[0] | {"labels": [9] * 8}]
    with pytest.raises(DataError, match=r"^part b: sample 2: labels\[0\]=9, input_ids\[0\]=5"):
        Mixture({"a": part(5), "b": broken}, {"a": 1, "b": 1})[7]


@pytest.mark.parametrize(
    ("world_size", "parts"), [(1, [0, 1, 2, 0, 1, 2, 1, 2, 2, 2]), (3, [0, 1, 2, 2])]
)
def test_a_batch_that_is_evaluated_is_of_one_part_and_every_sample_is_read_once(world_size, parts):
    ranks = [EvalBatches([5, 12, 20], 4, rank, world_size) for rank in range(world_size)]
    read = [list(batches) for batches in ranks]
    assert len({len(own) for own in read}) == 1
    bounds = [0, 5, 17, 37]
    for batches, own in zip(ranks, read, strict=True):
        # The parts alternate, so that a limit on the number of batches leaves no part out.
        assert [batches.part_of(number) for number in range(len(own))] == parts
        for place, batch in zip(parts, own, strict=True):
            assert all(bounds[place] <= i < bounds[place + 1] for i in batch if i >= 0)
    assert sorted(i for own in read for batch in own for i in batch if i >= 0) == list(range(37))


def test_a_mixture_with_other_tokens_in_one_part_has_another_fingerprint(tmp_path):
    """The files have the same length, so that the number of samples does not show the change."""
    fingerprints = set()
    for number, last in enumerate((7, 7, 8)):
        parts = {}
        for name, tokens in (("a", [1] * 40), ("b", [2] * 20 + [last] * 20)):
            path = tmp_path / f"{name}{number}.bin"
            np.array(tokens, np.uint16).tofile(path)
            parts[name] = TokenDataset(path, 4)
        fingerprints.add(Mixture(parts, {"a": 1, "b": 2}).fingerprint)
    assert len(fingerprints) == 2
    weights = {"a": 1, "b": 1}, {"a": 1, "b": 2}  # a resume with other weights is refused
    assert len({mixture(w, a=30, b=50).fingerprint for w in weights}) == 2
    # A user's dataset may have no fingerprint of its own. Then its name and its length count.
    lengths = {"a": 30, "b": 50}, {"a": 31, "b": 50}, {"a": 30, "c": 50}
    assert len({mixture(dict.fromkeys(n, 1), **n).fingerprint for n in lengths}) == 3


def test_the_tokenizer_is_that_of_the_part_that_has_one():
    a, b = part(5), part(5)
    b.tokenizer = load_tokenizer("bytes")
    assert Mixture({"a": a, "b": b}, {"a": 1, "b": 1}).tokenizer is b.tokenizer


def test_the_bytes_of_tokens_are_those_of_all_parts_or_not_known():
    """The bytes of one part would give `val/bits_per_byte` of another tokenizer."""
    a, b = part(5), part(5)
    a.token_bytes, b.token_bytes = np.array([1, 2, 3]), np.array([1, 2, 3])
    assert Mixture({"a": a, "b": b}, {"a": 1, "b": 1}).token_bytes.tolist() == [1, 2, 3]
    b.token_bytes = np.array([1, 2, 4])
    assert Mixture({"a": a, "b": b}, {"a": 1, "b": 1}).token_bytes is None
    for b.end_id, end_id in ((7, 7), (8, None)):  # a text ends at the end token of all parts
        a.end_id = 7
        assert Mixture({"a": a, "b": b}, {"a": 1, "b": 1}).end_id == end_id
    b.token_bytes = None
    assert Mixture({"a": a, "b": b}, {"a": 1, "b": 1}).token_bytes is None
