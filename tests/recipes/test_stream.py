"""The recipe `stream`: each token is a target once, also across a stop, on one and two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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


@pytest.mark.engine("datasets")
def test_a_rank_reads_its_documents_in_each_pass_and_continues_with_the_next_token(files):
    """Some documents fill several samples. The stream is stopped after each of its samples."""
    arguments = ("json", {"data_files": files, "split": "train"}, "bytes", 3, "text")
    stream = TextStream(*arguments).split_by_rank(1, 3)
    assert stream.end_id == 255 and stream.token_bytes.sum() == 254  # control tokens are no text
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in lines[1::3]]
    tokens = [token for text in texts for token in (*text.encode(), 255)]
    for epoch in (0, 1):  # each pass begins with the end token, whatever the one before has left
        stream.set_epoch(epoch)
        samples = [(first.tolist(), second.tolist()) for first, second in stream]
        targets = [token for _, second in samples for token in second]
        assert targets == tokens[: len(targets)] and 0 <= len(tokens) - len(targets) < 3
        assert [token for first, _ in samples for token in first] == [255, *targets[:-1]]
    for n_read in range(0, len(samples), 3):
        first, second = (TextStream(*arguments).split_by_rank(1, 3) for _ in range(2))
        iterator = iter(first)
        before = [next(iterator)[1].tolist() for _ in range(n_read)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after = [targets.tolist() for _, targets in second]
        assert [token for row in before + after for token in row] == targets
    with pytest.raises(DataError, match=r"^data\.path=json: "):
        TextStream("json", {"data_files": "none.jsonl", "split": "train"}, *arguments[2:])


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets: pip install 'gptrain\[datasets\]'"):
        TextStream("json", {}, "bytes", 3, "text")


@pytest.mark.engine("datasets")
@pytest.mark.slow
def test_a_run_on_two_ranks_that_was_stopped_ends_as_one_that_was_not(files, tmp_path, train):
    def metrics_of(folder: str, *words: str) -> dict[str, float]:
        sizes = ("model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1", "model.n_layers=1")
        data = ("data.path=json", f"data.files=[{','.join(files)}]", "data.seq_len=16")
        place = ("trainer.accelerator=cpu", "trainer.devices=2", f"run_dir={tmp_path / folder}")
        train("experiment=stream", "model=llama_nano", *sizes, "model.d_ff=32", *words, *data,
              *place, "data.batch_size=2", "scheduler=constant")  # fmt: skip
        return json.loads((tmp_path / folder / "result.json").read_text())["metrics"]

    full = metrics_of("full", "trainer.max_steps=6")
    metrics_of("again", "trainer.max_steps=2")
    again = metrics_of("again", "trainer.max_steps=6", "ckpt_path=last")
    for name in ("train/loss", "val/loss"):
        assert again[name] == full[name]
