"""Dummy samples are pure in (seed, i), uniform, and the same one by one or batched."""

import math

import numpy as np
import pytest
import torch

from gptrain.data import DummyTextDataset


def test_tokens_are_uniform_over_the_vocabulary():
    vocab_size, draws = 50, 200_000
    tokens, _ = DummyTextDataset(200, seq_len=1001, vocab_size=vocab_size).__getitems__(range(200))
    counts = np.bincount(tokens.flatten(), minlength=vocab_size)
    chi2 = ((counts - draws / vocab_size) ** 2 / (draws / vocab_size)).sum()
    # chi2 with 49 degrees of freedom has mean 49 and deviation sqrt(98); five of them.
    assert abs(chi2 - 49) < 5 * math.sqrt(98)


def test_an_index_outside_is_an_index_error_with_which_iteration_ends():
    dataset = DummyTextDataset(7)
    for index in (7, -8, 2**40):
        with pytest.raises(IndexError):
            dataset[index]
    assert len(list(dataset)) == len(dataset) == 7
    assert torch.equal(dataset[-1][0], dataset[6][0])
