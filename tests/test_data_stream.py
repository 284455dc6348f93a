"""Streams: each sample is read once by one rank, also across a stop and the beginning of a pass."""

from __future__ import annotations

import json
import pickle

import pytest
from torch.utils.data import IterableDataset

from gptrain.core.errors import DataError
from gptrain.data.stream import ReadStream, StreamDataset, as_indexed


class Numbers(IterableDataset):
    """The numbers 0 to n - 1."""

    def __init__(self, n: int):
        self.n, self.position = n, 0

    def __iter__(self):
        while self.position < self.n:
            self.position += 1
            yield self.position - 1
        self.position = 0


class Resumable(Numbers):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def parts(make, n_ranks: int, states=None, n_done=0) -> list[StreamDataset]:
    streams = [StreamDataset(make(), "data.train") for _ in range(n_ranks)]
    for rank, stream in enumerate(streams):
        assert stream[0] == stream[0]  # looking at a sample does not read it
        stream.start(rank, n_ranks, accumulate=2)
        if states:
            stream.load_state(pickle.loads(states[rank]), n_done)
    return streams


def read(streams: list[StreamDataset], n_batches: int) -> list:
    return [x for stream in streams for _ in range(n_batches) for x in stream.__getitems__([0, 0])]


def hugging_face(folder, n_files: int):
    import datasets

    for number in range(n_files):
        lines = [json.dumps({"x": number * 48 // n_files + i}) for i in range(48 // n_files)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    files = [f"{folder}/{number}.jsonl" for number in range(n_files)]
    options = {"split": "train", "streaming": True, "cache_dir": str(folder / "cache")}
    data = datasets.load_dataset("json", data_files=files, **options)
    return data.map(lambda row: row)


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize(
    "kind",
    ["own", pytest.param(1, marks=pytest.mark.engine("datasets")),
     pytest.param(2, marks=pytest.mark.engine("datasets"))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:data.train. every rank reads all samples")
def test_no_sample_is_repeated_or_left_out_across_a_stop(n_ranks, kind, tmp_path):
    def make():
        return Resumable(48) if kind == "own" else hugging_face(tmp_path, kind)

    streams = parts(make, n_ranks)
    before = read(streams, 6 // n_ranks * 2)
    read(streams, 1)  # a micro-batch of the step that a failure interrupts
    states = [pickle.dumps(stream.state_at(6 // n_ranks * 2)) for stream in streams]
    after = read(parts(make, n_ranks, states), 12 // n_ranks)
    values = [x if kind == "own" else x["x"] for x in before + after]
    assert sorted(values) == list(range(48))
    assert sorted(read(streams, 24 // n_ranks), key=str)  # the next pass begins by itself


def test_a_stream_without_a_state_or_without_samples_says_so():
    (stream,) = parts(lambda: Numbers(6), 1)
    assert stream.state_at(0) is None and "begins again on a resume" in stream.describe()
    with pytest.warns(UserWarning, match="data.train: .*; its first 8 samples are read again"):
        stream.load_state(None, 8)
    with pytest.warns(UserWarning, match="every rank reads all samples and keeps one of 2"):
        stream.start(0, 2, 1)
    with pytest.raises(DataError, match="the stream has no sample"):
        StreamDataset(Numbers(0), "data.train")[0]


def test_an_evaluation_reads_a_stream_at_once():
    assert as_indexed(Numbers(6), "data.val", 4).samples == [0, 1, 2, 3]
    assert len(ReadStream(Numbers(6), None)) == 6
    assert as_indexed([1, 2], "data.val", 1) == [1, 2]
