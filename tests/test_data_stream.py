"""Streams: each sample is read once by one rank, also across a stop and the beginning of a pass."""

from __future__ import annotations

import gc
import json
import os
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from gptrain.core.errors import ConfigError, DataError
from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.data.stream import as_indexed
from gptrain.lit import TextDataModule
from gptrain.runtime.signals import kill_workers


@pytest.fixture(autouse=True)
def workers_end():
    """End the processes that read streams, before their loaders are collected as garbage."""
    gc.disable()
    yield
    kill_workers()
    gc.enable()


class Numbers(IterableDataset):
    """The numbers 0 to n - 1. Each pass adds a thousand. The position is not saved."""

    def __init__(self, n: int, rank: int = 0, world_size: int = 1):
        self.n, self.rank, self.world_size, self.epoch = n, rank, world_size, 0

    def __iter__(self):
        for number in range(self.rank, self.n, self.world_size):
            yield torch.tensor(1000 * self.epoch + number)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def split_by_rank(self, rank, world_size):
        return type(self)(self.n, rank, world_size)


class Resumable(Numbers):
    """Numbers whose position is saved, in a dict that is not copied."""

    def __init__(self, *numbers):
        super().__init__(*numbers)
        self.state = {"done": 0}

    def __iter__(self):
        numbers = [*super().__iter__()]
        while self.state["done"] < len(numbers):
            self.state["done"] += 1
            yield numbers[self.state["done"] - 1]
        self.state["done"] = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


class Shuffled(Numbers):
    """Numbers that each pass shuffles with the generator that people use, and does not save."""

    def __iter__(self):
        numbers = [*super().__iter__()]
        random.shuffle(numbers)
        yield from numbers


class Noisy(Resumable):
    """Numbers plus a fraction that all three generators draw, as an augmentation does."""

    def __iter__(self):
        for number in super().__iter__():
            yield number + (random.random() + np.random.random() + torch.rand(()).item()) / 4


def hugging_face(folder, n_files: int, kind: str):
    import datasets

    for number in range(n_files):
        rows = [{"x": number * 48 // n_files + i} for i in range(48 // n_files)]
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = [f"{folder}/{number}.jsonl" for number in range(n_files)]
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    data = data.shuffle(seed=0, buffer_size=5) if kind != "plain" else data
    data = datasets.concatenate_datasets([data]) if kind == "in a part" else data
    return data.map(lambda row: {"x": row["x"]})


class Reader:
    """Reads the batches of two samples of one rank as a run does, ahead and in another process."""

    def __init__(self, stream, rank=0, world_size=1, state=None, seed=0):
        lengths = RunLengths(BatchPlan(2, world_size, 1), 1, 6, n_steps=99, validate_every=99)
        data = as_indexed(stream, "data.train", None)
        assert str(data[0]) == str(data[0])  # looking at a sample does not read it
        options = {"seed": seed, "rank": rank, "world_size": world_size}
        self.module = TextDataModule(data, data, None, lengths, **options)
        trainer: Any = SimpleNamespace(state=SimpleNamespace(fn="fit"), global_step=0)
        self.module.trainer = self.trainer = trainer
        if state is not None:
            trainer.global_step = state["step"]
            self.module.load_state_dict(state)
        self.batches = self._read()

    def _read(self):
        loader = self.module.train_dataloader()
        while True:  # an epoch of six steps after another
            yield from loader

    def read(self, n_steps: int) -> list[float]:
        numbers = []
        for _ in range(n_steps):
            batch = next(self.batches)
            numbers += (batch["x"] if isinstance(batch, dict) else batch).tolist()
            self.trainer.global_step += 1
        return numbers

    def state(self) -> dict:
        if self.module.world_size == 1:
            return json.loads(json.dumps(self.module.state_dict()))
        position = dict(self.module.positions)[self.trainer.global_step]
        own = {"step": self.trainer.global_step, "read": 0, "tokens": 0}
        return own | {"stream": [position] * self.module.world_size}


class Undivided(Shuffled):
    """Shuffled numbers that cannot be divided: each rank reads all of them and keeps its share."""

    split_by_rank = property()


class UndividedResumable(Resumable):
    split_by_rank = property()


@pytest.mark.parametrize("kind", [Numbers, Resumable, Shuffled, Noisy])
def test_a_stream_that_was_stopped_continues_as_one_that_was_not(kind, n_stop=7):
    """Of 17 samples, the passes end inside of batches, and the epochs inside of passes."""
    whole = Reader(kind(17)).read(20)
    first = Reader(kind(17))
    values = first.read(n_stop)
    second = Reader(kind(17), state=first.state())
    values += second.read(5)
    third = Reader(kind(17), state=second.state())  # a resume of a resumed run
    assert values + third.read(15 - n_stop) == whole
    passes = [sorted(int(n) for n in whole[17 * i : 17 * i + 17]) for i in range(2)]
    assert passes == [[1000 * i + n for n in range(17)] for i in range(2)]


def test_a_stream_follows_the_seed_and_does_not_change_the_numbers_of_the_training():
    readers = [Reader(Shuffled(17), seed=seed) for seed in (0, 0, 1)]
    before = random.getstate(), torch.get_rng_state()
    first, again, other = (reader.read(4) for reader in readers)
    assert first == again != other
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("kind", [Resumable, Shuffled, Undivided, UndividedResumable])
def test_ranks_divide_a_stream_and_continue_each_with_its_part(kind):
    first = [Reader(kind(16), rank, 2) for rank in range(2)]
    values = [number for reader in first for number in reader.read(3)]
    second = [Reader(kind(16), rank, 2, reader.state()) for rank, reader in enumerate(first)]
    values += [number for reader in second for number in reader.read(1)]
    assert sorted(map(int, values)) == list(range(16))


@pytest.mark.engine("datasets")
@pytest.mark.parametrize("n_files", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "shuffled", "in a part"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_of_datasets_is_divided_and_resumes(
    n_files, kind, world_size, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))

    def readers(states):
        data = [hugging_face(tmp_path, n_files, kind) for _ in range(world_size)]
        return [Reader(d, rank, world_size, states[rank]) for rank, d in enumerate(data)]

    first = readers([None, None])
    values = [number for reader in first for number in reader.read(9 // world_size)]
    n_left = 24 // world_size - 9 // world_size
    second = readers([reader.state() for reader in first])
    values += [number for reader in second for number in reader.read(n_left)]
    assert sorted(values) == list(range(48))


def test_a_stream_is_read_in_another_process_and_its_errors_are_one_line():
    class Pids(Numbers):
        def __iter__(self):
            yield torch.tensor(os.getpid())

    assert os.getpid() not in Reader(Pids(1)).read(2)

    class Broken(Numbers):
        def __iter__(self):
            yield from super().__iter__()
            if self.epoch:
                raise DataError("this file is damaged")

    with pytest.raises(DataError, match="this file is damaged"):
        Reader(Broken(5)).read(9)


def test_what_cannot_be_read_exactly_is_refused():
    with pytest.raises(DataError, match="the stream has no sample for this rank"):
        Reader(Numbers(1), 1, 2).read(1)  # the other rank has the only sample
    reader = Reader(Numbers(9), 0, 2)
    state = {"step": 2, "read": 8, "tokens": 4, "stream": [{}] * 3}
    with pytest.raises(ConfigError, match=r"trainer\.devices: .* 3 ranks .* not 2"):
        reader.module.load_state_dict(state)
    reader.trainer.state.fn = "validate"  # an evaluation reads no training data
    reader.module.load_state_dict(state)
