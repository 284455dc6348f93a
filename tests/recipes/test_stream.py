"""The recipe `stream`: each token is a target once, also across a stop, on one and two ranks."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from recipes.stream import TextStream

pytestmark = pytest.mark.engine("datasets")

TRAIN = next(path for path in Path(__file__).parents if (path / "train.py").is_file()) / "train.py"


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[str]:
    """Two files of twenty documents each, of uneven length."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in "ab":
        rows = [{"text": f"{name}{number}" * (1 + number % 9)} for number in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [f"{tmp_path}/{name}.jsonl" for name in "ab"]


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_every_token_is_a_target_once_across_a_stop(n_ranks, files):
    def make(rank: int) -> TextStream:
        stream = TextStream("json", {"data_files": files, "split": "train"}, "bytes", 7, "text")
        return stream.split_by_rank(rank, n_ranks)

    for rank in range(n_ranks):
        rest = files[rank::n_ranks]  # each rank reads whole files
        rows = [json.loads(line) for file in rest for line in Path(file).read_text().splitlines()]
        tokens = [token for row in rows for token in (*row["text"].encode(), 255)]
        first = make(rank)
        samples = iter(first)
        before = [next(samples) for _ in range(9)]
        second = make(rank)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        targets = [t for _, sample in [*before, *second] for t in sample.tolist()]
        assert targets == tokens[: len(targets)] and len(tokens) - len(targets) < 7


@pytest.mark.slow
def test_a_run_on_two_ranks_that_was_stopped_ends_as_one_that_was_not(files, tmp_path, monkeypatch):
    def train(folder: str, *words: str) -> list[dict]:
        sizes = ("model.d_model=16", "model.n_heads=2", "model.n_kv_heads=1", "model.n_layers=1")
        words = ("experiment=stream", "model=llama_nano", *sizes, "model.d_ff=32", *words)
        data = ("data.path=json", f"data.files=[{','.join(files)}]", "data.seq_len=16")
        run = ("trainer.accelerator=cpu", "trainer.devices=2", f"run_dir={tmp_path / folder}")
        monkeypatch.setattr(sys, "argv", ["train.py", *words, *data, *run, "data.batch_size=2"])
        with pytest.raises(SystemExit) as left:
            partial(runpy.run_path, str(TRAIN), run_name="__main__")()
        assert not left.value.code
        return json.loads((tmp_path / folder / "result.json").read_text())["metrics"]

    kept = ("checkpoint.every_n_steps=2", "checkpoint.keep=9", "trainer.max_steps=6")
    full = train("full", *kept)
    shutil.copytree(tmp_path / "full", tmp_path / "again")
    for folder in (tmp_path / "again" / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 2:
            shutil.rmtree(folder)
    (tmp_path / "again" / "result.json").unlink()
    again = train("again", *kept, "ckpt_path=last")
    for name in ("train/loss", "val/loss"):
        assert again[name] == full[name]
