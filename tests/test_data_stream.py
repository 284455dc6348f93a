"""Streams: each sample is read once by one rank, also across a stop and the beginning of a pass."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from gptrain.core.errors import ConfigError, DataError
from gptrain.core.lengths import BatchPlan, RunLengths
from gptrain.data.hugging_face import as_pairs
from gptrain.data.samples import BatchReader
from gptrain.data.stream import (
    PositionReader,
    ReadStream,
    StreamDataset,
    StreamPositions,
    as_indexed,
    find_stream,
)
from gptrain.lit import TextDataModule


class Numbers(IterableDataset):
    """The numbers 0 to n - 1."""

    def __init__(self, n: int):
        self.n, self.position = n, 0

    def __iter__(self):
        yield from range(self.n)


class Resumable(Numbers):
    def __iter__(self):
        while self.position < self.n:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Passes(Numbers):
    """Numbers to which each pass adds another hundred; the position is not saved."""

    epoch = 0

    def __iter__(self):
        return (100 * self.epoch + number for number in super().__iter__())

    def set_epoch(self, epoch):
        self.epoch = epoch


class ResumablePasses(Passes, Resumable):
    """Numbers to which each pass adds another hundred; the position is saved."""


class Divided(ResumablePasses):
    """Passes that divide themselves: a part has a row of the numbers. Their state is not copied."""

    first = 0

    def __init__(self, n: int):
        super().__init__(n)
        self.state = {"position": 0}

    def split_by_rank(self, rank, world_size):
        part = Divided(self.n // world_size)
        part.first = rank * part.n
        return part

    def __iter__(self):
        return (self.first + number for number in super().__iter__())

    def state_dict(self):
        self.state["position"] = self.position
        return self.state


class Counted:
    """A stream with the methods of litdata's StreamingDataset: a rank has a row of its samples."""

    def __init__(self, n: int):
        self.n, self.state, self.batch_size = n, {"num_samples_yielded": 0}, 3
        self.distributed_env = Environment(2, 1, 1)  # litdata finds the ranks of the process group

    def __len__(self):
        return self.n // self.distributed_env.world_size

    def __iter__(self):
        first = self.distributed_env.global_rank * len(self)
        yield from range(first + self.state["num_samples_yielded"], first + len(self))
        self.state = {"num_samples_yielded": 0}

    def state_dict(self, num_samples_yielded, num_workers, batch_size):
        assert (num_workers, batch_size) == (1, 3)
        return {"num_samples_yielded": num_samples_yielded}

    def load_state_dict(self, state):
        self.state = state


class Environment(NamedTuple):
    world_size: int
    global_rank: int
    num_nodes: int


class Part:
    """A part of a stream, which is read in batches of two samples."""

    def __init__(self, stream: StreamDataset, number: int, states=None):
        self.stream, self.positions = stream, StreamPositions([number], accumulate=1)
        if states:
            self.positions.load([*map(pickle.loads, states)])
        stream.start(number, self.positions.newest[number])
        reader = PositionReader(BatchReader(stream), stream)
        self.batches = self.positions.record(reader.__getitems__([0, 0]) for _ in count())

    def state_after(self, n_batches: int) -> bytes:
        return pickle.dumps(*self.positions.after(n_batches).values())


def parts(make, n_parts: int, states=None) -> list[Part]:
    streams = [as_indexed(make(), "data.train", None) for _ in range(n_parts)]
    for stream in streams:
        assert stream[0] == stream[0]  # looking at a sample does not read it
        stream.n_parts = n_parts
    return [Part(stream, number, states) for number, stream in enumerate(streams)]


def read(parts: list[Part], n_batches: int) -> list[int]:
    batches = [next(part.batches) for part in parts for _ in range(n_batches)]
    tensors = [batch["x"] if isinstance(batch, dict) else batch for batch in batches]
    return torch.cat(tensors).tolist()


def hugging_face(folder, n_files: int):
    """Return a stream of two files, or of one that is shuffled in a buffer."""
    import datasets

    for number in range(n_files):
        lines = [json.dumps({"x": number * 48 // n_files + i}) for i in range(48 // n_files)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    files = [f"{folder}/{number}.jsonl" for number in range(n_files)]
    options = {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}
    data = datasets.load_dataset("json", data_files=files, **options)
    data = data if n_files > 1 else data.shuffle(seed=0, buffer_size=5)
    return data.map(lambda row: row)


@pytest.mark.parametrize("n_parts", [1, 2])
@pytest.mark.parametrize(
    "kind",
    [Resumable, Numbers, Counted, Divided, pytest.param(1, marks=pytest.mark.engine("datasets")),
     pytest.param(2, marks=pytest.mark.engine("datasets"))],
)  # fmt: skip
def test_no_sample_is_repeated_or_left_out_across_a_stop(n_parts, kind, tmp_path):
    def make():
        return hugging_face(tmp_path, kind) if isinstance(kind, int) else kind(48)

    first = parts(make, n_parts)
    values = read(first, 12 // n_parts)
    read(first, 2)  # a failure may be noticed when the next two steps are loaded
    states = [part.state_after(12 // n_parts) for part in first]
    second = parts(make, n_parts, states)
    values += read(second, 6 // n_parts)
    states = [part.state_after(6 // n_parts) for part in second]
    values += read(parts(make, n_parts, states), 6 // n_parts)  # a resume of a resumed run
    assert sorted(values) == list(range(48))
    assert read(first, 24 // n_parts)  # the next pass begins by itself


@pytest.mark.parametrize(("kind", "step"), [(Passes, 100), (ResumablePasses, 100), (Counted, 0)])
def test_a_stop_in_a_later_pass_continues_in_that_pass(kind, step):
    (part,) = parts(lambda: kind(8), 1)
    assert read([part], 6) == [*range(8), *range(step, step + 4)]
    states = [part.state_after(6)]
    expected = [*range(step + 4, step + 8), *range(2 * step, 2 * step + 4)]
    assert read(parts(lambda: kind(8), 1, states), 4) == expected


def test_a_stream_does_not_see_the_data_workers_and_is_found_behind_its_pairs(monkeypatch):
    """A stream that divided itself over the workers, too, would leave out samples."""
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", SimpleNamespace(id=1))
    samples = [{"input_ids": [number, 7], "labels": [number, 7]} for number in range(4)]
    stream = as_indexed(iter(samples), "data.train", None)
    assert find_stream(as_pairs(stream, "data.train")) is find_stream(stream) is stream
    assert find_stream(as_pairs(samples, "data.val")) is None
    assert stream.__getitems__([0, 1, 2]) == samples[:1] * 3  # a look at the data before the start
    stream.start(0, None)
    assert get_worker_info() is None


def test_each_part_of_a_divided_stream_has_its_own_position_in_its_own_pass():
    two = parts(lambda: Divided(8), 2)
    assert read(two, 3) == [0, 1, 2, 3, 100, 101, 4, 5, 6, 7, 104, 105]
    states = [part.state_after(3) for part in two]
    assert read(parts(lambda: Divided(8), 2, states), 1) == [102, 103, 106, 107]


def test_the_positions_of_a_rank_are_those_of_its_own_workers_after_complete_steps():
    positions = StreamPositions([2, 3], accumulate=2)
    positions.load(["a", "b", "c", "d"])
    assert positions.newest == positions.after(0) == {2: "c", 3: "d"}
    results = [(None, 2, "passed"), *zip("vwxyz", (2, 3, 2, 3, 2), "cdefg", strict=True)]
    assert "".join(positions.record(results)) == "vwxyz"
    assert positions.after(2) == {2: "c", 3: "d"} and positions.after(4) == {2: "e", 3: "f"}
    assert positions.newest == {2: "g", 3: "f"}


def test_a_stream_of_datasets_is_split_by_its_package_and_with_a_buffer_is_read_again(monkeypatch):
    """The classes stand in for those of the package `datasets`."""

    class BufferShuffledExamplesIterable(SimpleNamespace):
        pass

    class Shuffled(Resumable):
        _ex_iterable = SimpleNamespace(ex_iterable=BufferShuffledExamplesIterable())

    part = StreamDataset(Shuffled(6), "data.train")
    assert "is read again on a resume" in part.describe()
    part.start(0, None)
    assert part.__getitems__([0, 0, 0]) == [0, 1, 2]
    assert part.position() == {"epoch": 0, "state": None, "n_read": 3}

    distributed = ModuleType("datasets.distributed")
    vars(distributed)["split_dataset_by_node"] = lambda stream, rank, n: Numbers(100 * rank + n)
    monkeypatch.setitem(sys.modules, "datasets.distributed", distributed)
    monkeypatch.setattr(Resumable, "__module__", "datasets.iterable_dataset")
    part = StreamDataset(Resumable(6), "data.train")
    part.n_parts = 3
    assert "divided over 3 readers by split_dataset_by_node · resumes exactly" in part.describe()
    part.start(2, None)
    assert part.part.n == 203


def test_readers_that_the_nodes_do_not_divide_are_those_of_one_node_for_litdata():
    data = Counted(24)
    data.distributed_env = Environment(4, 1, 2)
    stream = as_indexed(data, "data.train", None).stream
    for n_readers, n_nodes in ((6, 2), (3, 1)):
        assert stream.split_by_rank(2, n_readers) is stream
        assert data.distributed_env == (n_readers, 2, n_nodes)


@pytest.mark.parametrize(
    ("n_saved", "hint"),
    [(3, "trainer.num_nodes=1 trainer.devices=6 data.num_workers=0"), (4, "data.num_workers=2")],
)
def test_positions_of_another_number_of_readers_are_refused_with_a_layout_that_has_it(
    n_saved, hint
):
    """Two groups of two ranks read the stream. They cannot share three readers evenly."""
    lengths = RunLengths(BatchPlan(1, 2, 1), 1, epoch_steps=2, n_steps=2, validate_every=2)
    stream = as_indexed(Numbers(20), "data.train", None)
    module = TextDataModule(stream, stream, None, lengths, seed=0, world_size=2, ranks_per_sample=2)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn="fit"))
    module.trainer = trainer
    state = {"step": 2, "place": [0, 2], "tokens": 4, "stream": [{}] * n_saved}
    with pytest.raises(ConfigError, match=f"{n_saved} readers .*; try: {hint}$"):
        module.load_state_dict(state)
    trainer.state.fn = "validate"  # an evaluation reads no training data, whatever its layout
    module.load_state_dict(state)
    for rank in (0, 1):
        module = TextDataModule(stream, stream, None, lengths, seed=0, rank=rank, world_size=2)
        with warnings.catch_warnings(record=True) as warned:
            module.train_dataloader()
        assert [str(w.message).count("keeps one of 2") for w in warned] == [1] * (rank == 0)


def test_the_workers_of_a_rank_start_at_the_positions_of_their_parts_in_a_checkpoint(monkeypatch):
    lengths = RunLengths(BatchPlan(1, 2, 3), 1, epoch_steps=2, n_steps=2, validate_every=2)
    stream = as_indexed(Numbers(20), "data.train", None)
    options = {"rank": 1, "world_size": 2, "num_workers": 2, "pin_memory": True}
    module = TextDataModule(stream, cast(Any, [0] * 8), None, lengths, seed=0, **options)
    module.trainer = cast(Any, SimpleNamespace(state=SimpleNamespace(fn="fit"), global_step=0))
    saved = [{"epoch": 0, "state": None, "n_read": number} for number in range(1, 5)]
    state = {"step": 0, "place": [0, 0], "tokens": 0, "stream": saved}
    module.load_state_dict(state)
    loader = cast(Any, module.train_dataloader())
    *_, parts = loader.worker_init_fn.args
    assert parts == [(2, saved[2]), (3, saved[3])] and module.batches.n_turns == 2
    monkeypatch.setattr("gptrain.lit.datamodule.ignore_in_worker", lambda parent_pid: None)
    loader.worker_init_fn(1)  # as in the second worker
    assert (stream.number, stream.n_read) == (3, 4)
    assert (loader.read_ahead, loader.positions) == (3, module.positions)
    evaluated = cast(Any, module.val_dataloader())
    assert (evaluated.read_ahead, evaluated.positions) == (1, None)
    assert loader.pin_memory and evaluated.pin_memory


def test_a_stream_without_a_state_or_without_samples_says_so():
    (part,) = parts(lambda: Numbers(6), 1)
    assert "is read again on a resume" in part.stream.describe()
    read([part], 2)
    with pytest.warns(
        UserWarning, match="data.train: .* cannot save its position; the first 4 samples"
    ):
        part.stream.warn(pickle.loads(part.state_after(2)))
    assert (len(part.stream), len(as_indexed(Counted(6), "data.train", None))) == (2**40, 6)
    part.stream.n_parts = 2
    with pytest.warns(UserWarning, match="every reader reads all samples and keeps one of 2"):
        part.stream.warn(None)
    stream = Numbers(6)
    stream.end_id = 7
    stream.describe = lambda n_samples: "numbers"
    assert as_indexed(stream, "data.val", 2).end_id == 7  # the wrapper of an evaluation, too
    assert as_indexed(stream, "data.val", 2).describe(6) == "numbers"
    assert StreamDataset(stream, "data.train").end_id == 7
    assert StreamDataset(stream, "data.train").describe(6).startswith("a stream · one reader")
    with pytest.raises(DataError, match="the stream has no sample"):
        StreamDataset(Numbers(0), "data.train")[0]
    # Of three readers that read the same stream of two samples, the last one has none.
    stream = StreamDataset(Numbers(2), "data.train")
    stream.n_parts = 3
    stream.start(2, None)
    with pytest.raises(DataError, match=r"^data\.train: the stream has no sample for this reader$"):
        stream.__getitems__([0])


def test_an_evaluation_reads_a_stream_at_once():
    assert as_indexed(Numbers(6), "data.val", 4).samples == [0, 1, 2, 3]
    assert len(ReadStream(Numbers(6), None)) == 6
    assert as_indexed([1, 2], "data.val", 1) == [1, 2]
    assert as_indexed(Counted(6), "data.val", None).samples == [*range(6)]
