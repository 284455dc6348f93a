"""Samples are dealt without overlap, without loss, and the same however they are split."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.data import (
    BatchReader,
    DataError,
    DummyTextDataset,
    EvalBatches,
    SampleOrder,
    TrainBatches,
    collate,
)
from gptrain.data.order import GOLDEN, mix64
from gptrain.lit import TextDataModule


def epoch_of(n_samples, seed=0, epoch=0):
    return SampleOrder(n_samples, seed).index(epoch * n_samples + np.arange(n_samples))


def run_of(order, n_epochs, position=0, **options):
    """All micro-batches of a run from a position to the end of its last epoch, as a list."""
    batches = TrainBatches(order, position=lambda: position, **options)
    taken = []
    while position < n_epochs * len(batches):
        epoch = list(batches)
        taken += epoch
        position += len(epoch)
    return taken


# ---- the permutation


def test_the_random_numbers_and_the_order_are_the_same_in_every_version():
    """A run that is resumed by a later version of the library reads the samples that are left."""
    steps = np.arange(1, 4, dtype=np.uint64) * GOLDEN
    reference = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # SplitMix64, seed 0
    assert mix64(steps).tolist() == reference
    order = SampleOrder(11, seed=3)
    assert order.index(np.arange(11)).tolist() == [5, 1, 2, 10, 9, 8, 6, 0, 7, 3, 4]
    assert order.index(np.arange(22, 33)).tolist() == [0, 5, 10, 6, 8, 7, 1, 2, 9, 4, 3]
    tokens, targets = DummyTextDataset(5, seq_len=8, vocab_size=1000, seed=3)[4]
    assert tokens.tolist() == [788, 812, 770, 287, 702, 834, 891] and targets[-1] == 503


def test_an_index_outside_is_an_index_error_with_which_iteration_ends():
    dataset = DummyTextDataset(7)
    for index in (7, -8, 2**40):
        with pytest.raises(IndexError):
            dataset[index]
    assert len(list(dataset)) == len(dataset) == 7
    assert torch.equal(dataset[-1][0], dataset[6][0])


def test_every_size_is_permuted():
    for n_samples in (*range(1, 301), 65_536, 300_007):
        order = epoch_of(n_samples, seed=n_samples, epoch=3)
        assert np.array_equal(np.sort(order), np.arange(n_samples))


def test_a_huge_data_set_costs_no_memory():
    order = SampleOrder(10**15 + 37, seed=5)
    samples = order.index(2 * (10**15 + 37) + np.array([0, 10**15 + 36, 12345]))
    assert len(set(samples)) == 3 and samples.min() >= 0 and samples.max() < 10**15 + 37


def test_epochs_and_seeds_have_other_orders():
    orders = [epoch_of(100, seed, epoch) for seed in range(5) for epoch in range(5)]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).mean() < 0.15  # unrelated orders agree at 1 of 100 places


@pytest.mark.parametrize("n_samples", [0, 7])
def test_fewer_samples_than_one_step_are_an_error(n_samples):
    with pytest.raises(DataError, match=f"{n_samples} samples, one step needs 8"):
        TrainBatches(SampleOrder(n_samples, 0), batch_size=2, accumulate=2, world_size=2)


# ---- training


@settings(max_examples=15)
@given(
    n_samples=st.integers(24, 300),
    splits=st.permutations([1, 2, 3, 4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_step_has_the_same_samples_however_it_is_dealt(n_samples, splits, seed):
    batch_size, accumulate, world_size = (splits[0], splits[1], 24 // splits[0] // splits[1])
    order = SampleOrder(n_samples, seed)
    steps = [set() for _ in range(n_samples // 24)]
    ranks = [
        list(TrainBatches(order, batch_size, accumulate, rank, world_size))
        for rank in range(world_size)
    ]
    for micro_step, batches in enumerate(zip(*ranks, strict=True)):
        step = steps[micro_step // accumulate]
        for batch in batches:
            assert len(batch) == batch_size and step.isdisjoint(batch)
            step.update(batch)
    whole = order.index(np.arange(n_samples))
    assert steps == [set(whole[24 * s : 24 * s + 24]) for s in range(len(steps))]


@settings(max_examples=15)
@given(
    n_samples=st.integers(12, 90),
    world_size=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    where=st.floats(0, 1),
)
def test_a_run_resumes_exactly_where_it_stopped(n_samples, world_size, accumulate, where):
    order, rank = SampleOrder(n_samples, seed=2), world_size - 1
    dealt = dict(batch_size=2, accumulate=accumulate, rank=rank, world_size=world_size)
    whole = run_of(order, 3, **dealt)
    stop = int(where * (len(whole) - 1))
    assert run_of(order, 3, position=stop, **dealt) == whole[stop:]


@settings(max_examples=15)
@given(st.integers(8, 40), st.integers(1, 20), st.integers(0, 80))
def test_the_length_of_an_epoch_does_not_change_what_a_step_has(n_samples, epoch_steps, where):
    order = SampleOrder(n_samples, seed=5)
    dealt = dict(batch_size=2, accumulate=2, rank=1, world_size=2)
    batches = TrainBatches(order, epoch_steps=epoch_steps, position=lambda: where, **dealt)
    assert len(batches) == 2 * epoch_steps  # micro-batches, also of several permutations
    end = (where // len(batches) + 1) * len(batches)  # the end of the current epoch
    assert list(batches) == run_of(order, end, **dealt)[where:end]


class Noise(Dataset):
    """Draws its samples, as one that augments them does."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(2), torch.rand(2)


def test_what_workers_draw_follows_the_seed_and_differs_between_ranks():
    def drawn(seed, rank):
        lengths = RunLengths(BatchPlan(1, 2, 1), 2, epoch_steps=2, n_steps=2, validate_every=2)
        options = {"seed": seed, "rank": rank, "world_size": 2, "num_workers": 1}
        module = TextDataModule(Noise(), Noise(), None, lengths, **options)
        assert module.train_dataloader().persistent_workers  # a worker keeps its place in a stream
        return [tokens.tolist() for tokens, _ in module.val_dataloader()]

    before = torch.get_rng_state()
    first = drawn(0, 0)
    assert drawn(0, 0) == first and first not in (drawn(0, 1), drawn(1, 0))
    assert torch.equal(torch.get_rng_state(), before)


# ---- evaluation


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 5))
def test_evaluation_reads_every_sample_once_in_equally_many_batches(
    n_samples, batch_size, world_size
):
    ranks = [EvalBatches([n_samples], batch_size, rank, world_size) for rank in range(world_size)]
    batches = [batch for rank in ranks for batch in rank]
    assert len({len(rank) for rank in ranks}) == 1
    assert sum(len(rank) for rank in ranks) == len(batches)
    read = [sample for batch in batches for sample in batch if sample >= 0]
    assert sorted(read) == list(range(n_samples))
    fillers = [batch for batch in batches if batch[0] < 0]
    assert fillers == [[-1]] * (world_size - n_samples if 0 < n_samples < world_size else 0)
    sizes = {len(batch) for batch in batches if batch[0] >= 0} or {0}
    assert max(sizes) <= max(batch_size, 2) and max(sizes) - min(sizes) <= 1
    n_needed = -(-n_samples // (batch_size * world_size)) if batch_size > 1 else 0
    assert batch_size == 1 or len(ranks[0]) == n_needed


class Samples(Dataset):
    """A user's own data set: samples of any form, made of a number."""

    def __init__(self, sample, n_samples=5):
        self.sample, self.n_samples = sample, n_samples

    def __len__(self):
        return self.n_samples

    def __getitem__(self, index):
        return self.sample(torch.full((3,), index))


def evaluated(dataset):
    """The batches of five samples by three."""
    batches = EvalBatches([5], 3)
    return list(DataLoader(BatchReader(dataset), batch_sampler=batches, collate_fn=collate))


@pytest.mark.parametrize(
    "sample",
    [
        lambda x: (x**2, (x + 1) ** 2),
        lambda x: (x / 2, float(x[0])),
        lambda x: {"tokens": x, "targets": x + 1},
        lambda x: (x, x, x),
        lambda x: x,
    ],
)
def test_a_batch_has_its_samples_in_any_form_and_no_other(sample):
    dataset = Samples(sample)
    first, last = evaluated(dataset)
    assert str(first) == str(collate([dataset[0], dataset[1]]))
    assert str(last) == str(collate([dataset[2], dataset[3], dataset[4]]))


def test_a_rank_without_a_sample_gets_one_whose_targets_do_not_count():
    tokens, targets = BatchReader(DummyTextDataset(5, seq_len=5), n_positions=4).__getitems__([-3])
    assert torch.equal(tokens[0], DummyTextDataset(5, seq_len=5)[2][0])
    assert (targets == -100).all() and targets.shape == (1, 4)
    packed = [(torch.arange(4), torch.arange(4), torch.tensor([0, 0, 1, 1]))]
    _, targets, documents = BatchReader(packed, n_positions=4).__getitems__([-1])
    assert (targets == -100).all() and documents.tolist() == [[0, 0, 1, 1]]


def test_a_change_of_the_batch_repeats_and_leaves_out_no_sample():
    before = TrainBatches(SampleOrder(97, seed=1), 4, accumulate=2)
    after = TrainBatches(SampleOrder(97, seed=1), 3, 2, rank=1, world_size=2, position=lambda: 10)
    after.resumed = (5, before.n_read(5))
    read = [before.step_samples(step) for step in range(5)]
    read += [after.step_samples(step) for step in range(5, 20)]
    numbers = np.concatenate([samples.ravel() for samples in read])
    assert numbers.tolist() == SampleOrder(97, seed=1).index(np.arange(220)).tolist()
    expected = [[*map(int, s)] for n in range(5, 8) for s in after.step_samples(n)[:, 1]]
    assert list(after) == expected  # the epoch of 8 steps ends here
