"""The recipe `stream`: each token is a target once, also across a stop, on one and two ranks."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType

import pytest

from gptrain.core.errors import DataError
from recipes.stream import TextStream


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[str]:
    """Two files of twenty documents each, of uneven length."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in "ab":
        rows = [{"text": f"{name}{number}" * (1 + number % 9)} for number in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"{tmp_path}/{name}.jsonl" for name in "ab"]


class Documents:
    """Documents of a stream of `datasets`, without the package: one of `world_size` each."""

    def __init__(self, rows: list[dict], rank: int = 0, world_size: int = 1):
        self.rows, self.rank, self.world_size = rows, rank, world_size
        self.position, self.epoch = 0, 0

    def __iter__(self):
        while (index := self.position * self.world_size + self.rank) < len(self.rows):
            self.position += 1
            yield {key: f"{text}{self.epoch}" for key, text in self.rows[index].items()}
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


@pytest.fixture
def asked(monkeypatch) -> list:
    """Put a stand-in of `datasets` in its place, and return what `load_dataset` was asked for."""
    asked = []

    def load_dataset(path, *, streaming, **options):
        if path == "none":
            raise FileNotFoundError("no such data")
        asked.append((path, options, streaming))
        return Documents([{"body": f"{'d' * (number % 5)}{number}"} for number in range(20)])

    def split_dataset_by_node(documents, rank, world_size):
        return Documents(documents.rows, rank, world_size)

    package, part = ModuleType("datasets"), ModuleType("datasets.distributed")
    vars(package).update(load_dataset=load_dataset, distributed=part)
    vars(part).update(split_dataset_by_node=split_dataset_by_node)
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.distributed", part)
    return asked


def test_a_rank_reads_its_documents_in_each_pass_and_continues_with_the_next_token(
    asked, monkeypatch
):
    """Some documents fill several samples. The stream is stopped after each of its samples."""
    arguments = ("json", {"split": "train"}, "bytes", 3, "body")
    stream = TextStream(*arguments).split_by_rank(1, 3)
    assert asked[0] == ("json", {"split": "train"}, True) and stream.end_id == 255
    assert stream.token_bytes.sum() == 254  # the two control tokens are no text
    texts = [f"{'d' * (number % 5)}{number}" for number in range(1, 20, 3)]

    def tokens(epoch: int) -> list[int]:
        return [token for text in texts for token in (*f"{text}{epoch}".encode(), 255)]

    for epoch in (0, 1):  # each pass begins with the end token, whatever the one before has left
        stream.set_epoch(epoch)
        samples = [(first.tolist(), second.tolist()) for first, second in stream]
        targets = [token for _, second in samples for token in second]
        assert targets == tokens(epoch)[: len(targets)]
        assert 0 < len(tokens(epoch)) - len(targets) < 3
        inputs = [token for first, _ in samples for token in first]
        assert inputs == [255, *targets[:-1]]
    for n_read in range(len(samples)):
        first = TextStream(*arguments).split_by_rank(1, 3)
        iterator = iter(first)
        before = [next(iterator)[1].tolist() for _ in range(n_read)]
        state = json.loads(json.dumps(first.state_dict()))
        second = TextStream(*arguments).split_by_rank(1, 3)
        second.load_state_dict(state)
        after = [targets.tolist() for _, targets in second]
        assert [t for row in before + after for t in row] == tokens(0)[: len(targets)]
    with pytest.raises(DataError, match=r"^data\.path=none: no such data$"):
        TextStream("none", *arguments[1:])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets: pip install 'gptrain\[datasets\]'"):
        TextStream(*arguments)


@pytest.mark.engine("datasets")
@pytest.mark.slow
def test_a_run_on_two_ranks_that_was_stopped_ends_as_one_that_was_not(files, tmp_path, train):
    def metrics_of(folder: str, *words: str) -> dict[str, float]:
        sizes = ("model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1", "model.n_layers=1")
        data = ("data.path=json", f"data.files=[{','.join(files)}]", "data.seq_len=16")
        place = ("trainer.accelerator=cpu", "trainer.devices=2", f"run_dir={tmp_path / folder}")
        train("experiment=stream", "model=llama_nano", *sizes, "model.d_ff=32", *words, *data,
              *place, "data.batch_size=2")  # fmt: skip
        return json.loads((tmp_path / folder / "result.json").read_text())["metrics"]

    kept = ("checkpoint.every_n_steps=2", "checkpoint.keep=9", "trainer.max_steps=6")
    full = metrics_of("full", *kept)
    shutil.copytree(tmp_path / "full", tmp_path / "again")
    for folder in (tmp_path / "again" / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 2:
            shutil.rmtree(folder)
    (tmp_path / "again" / "result.json").unlink()
    again = metrics_of("again", *kept, "ckpt_path=last")
    for name in ("train/loss", "val/loss"):
        assert again[name] == full[name]
