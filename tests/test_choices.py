"""The data, the lengths and the vocabulary that a choice gives a run, and the keys of its yaml."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models

from tests.command_line import compose_run
from tests.conftest import ROOT

CONFS = (ROOT / "conf", ROOT / "src" / "gptrain" / "conf")
REQUIRED = ("data.train_path=train.bin", "data.val_path=val.bin")


@pytest.mark.parametrize("choice", ["quickstart", "simple_gpt_ddp"])
def test_an_experiment_goes_through_every_part_once(train, tmp_path, choice):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 800)
    small = [
        f"experiment={choice}", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
        "model.vocab_size=300", "data.seq_len=16", "data.batch_size=2", "trainer.accelerator=cpu",
        "trainer.devices=1", "trainer.fast_dev_run=true", "data.global_batch_size=null",
    ]  # fmt: skip
    if choice == "quickstart":
        small += ["model.n_kv_heads=1", "model.d_ff=64", f"data.path={text}"]
    run = train(*small, tiny=False)
    assert run.code == 0, run.err
    assert "test/loss" in run.out and "val/loss" in run.out
    kept = {path.name for path in run.folder.iterdir()}
    assert not kept & {"checkpoints", "result.json"}
    assert not [name for name in kept if name.startswith("events")]


def test_samples_are_as_long_as_the_context_of_the_net():
    for words, seq_len in (
        (("model=gpt2", "data.seq_len=64"), 64),
        (("model=gpt2", "data=text", "model.max_seq_len=300"), 300),
        (("model=llama_nano", "data=text"), 256),
        (("model=llama_1b", "data=tokens", *REQUIRED), 8192),  # of 131072
        (("model=my_lstm", "data=text"), 128),  # a net without max_seq_len
    ):
        data = compose_run(*words).data
        assert data.plain()["seq_len"] == data.train.arguments["seq_len"] == seq_len, words


def test_the_size_of_the_vocabulary_is_that_of_the_tokenizer_or_the_model(tmp_path):
    auto = ("model=llama_nano", "data=text", "model.vocab_size=auto")
    assert compose_run(*auto).model.vocab_size == 256  # bytes
    words = models.WordLevel({"a": 0, "b": 299}, unk_token="a")
    Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    assert compose_run(*auto, f"data.tokenizer={tmp_path}").model.vocab_size == 300
    # The datasets repeat the tokenizer of their group. The largest tokenizer of a mixture counts.
    cfg = compose_run(*auto, f"data.val.tokenizer={tmp_path}")
    assert cfg.model.vocab_size == 256
    parts = [f"+data@data.parts.{name}=text" for name in "abc"]
    mixed = ("model=llama_nano", "model.vocab_size=auto", "data=mixture", *parts)
    assert compose_run(*mixed, f"data.parts.b.tokenizer={tmp_path}").model.vocab_size == 300
    cfg = compose_run(*auto, f"init_from={tmp_path}", "data.tokenizer=${init_from}",
                      "model.vocab_multiple=64")  # fmt: skip
    assert cfg.model.vocab_size == cfg.data.train.arguments["vocab_size"] == 320
    (tmp_path / "config.json").write_text('{"vocab_size": 512}')
    cfg = compose_run("model=hugging_face", f"model.path={tmp_path}", "model.vocab_size=auto")
    assert cfg.model.vocab_size == 512
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "text_config": {"vocab_size": 640}}')
    cfg = compose_run("model=hugging_face", f"model.path={tmp_path}", "model.vocab_size=auto")
    assert cfg.model.vocab_size == 640  # of a model that also reads images
