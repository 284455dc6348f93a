"""The command `export` writes weights and tokenizer for other programs. See test_layouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from gptrain.config.cli import run_command
from gptrain.core import shell
from gptrain.data import load_tokenizer
from gptrain.export.__main__ import ExportRun, export
from gptrain.generate import __main__ as command


@pytest.fixture
def export_run(capfd, tmp_path):
    """Runs the verb in this process; returns its exit code, its folder and what it said."""

    def run(*overrides: str, name: str = "export") -> tuple:
        folder = tmp_path / name
        words = [shell.override("run_dir", folder), *overrides]
        capfd.readouterr()  # what other libraries have printed
        code = run_command(export, words, ExportRun)
        out, err = capfd.readouterr()
        return code, folder, out + err

    return run


@pytest.mark.engine("transformers")
def test_both_formats_start_another_run_with_the_very_weights(train, saved_twice, export_run):
    from transformers import GPT2LMHeadModel

    for form, dtype, mode, step in (("safetensors", "bf16", "min", 2), ("hf", "fp32", "max", 4)):
        state = saved_twice.state(step)["weights"]
        words = (f"from_run={saved_twice.folder}", f"format={form}", f"dtype={dtype}")
        name = f"of {form}, é=1"
        _, folder, output = export_run(*words, f"checkpoint.mode={mode}", name=name)
        weights = saved_twice.folder / "checkpoints" / f"step-{step:08d}"
        n_bytes = (folder / "model.safetensors").stat().st_size
        assert f" {weights}, {dtype}, {n_bytes / 2**20:.1f} MiB, in {folder}\n" in output
        stored = load_file(folder / "model.safetensors")
        if form == "safetensors":  # the net's own names
            assert state.keys() == stored.keys()
            assert all(torch.equal(stored[name], state[name].bfloat16()) for name in stored)
            code, second_folder, output = export_run(
                words[0], "format=hf", "dtype=bf16", name="theirs"
            )
            assert code == 0, output
            net = GPT2LMHeadModel.from_pretrained(second_folder, dtype="auto")
            assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
        begun = train(
            words[0], shell.override("init_from", folder),
            "optimizer.lr=1e-12", "optimizer.weight_decay=0",
            "trainer.max_steps=1", "logger=none", name=f"from_{form}",
        )  # fmt: skip
        assert begun.code == 0, begun.err
        for name, tensor in begun.state(1)["weights"].items():
            expected = state[name].bfloat16().float() if dtype == "bf16" else state[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "form", ["safetensors", pytest.param("hf", marks=pytest.mark.engine("transformers"))]
)
def test_an_export_generates_the_same_text_as_its_run(
    speaker, export_run, capfd, tmp_path, form, monkeypatch
):
    """Both moved, the run gone, and its data, of which no word is needed."""

    def spoken(source: Path) -> str:
        words = [f"from_run={source}", "prompt='def é'", "n_tokens=12"]
        code = run_command(command.generate, words, command.GenerateRun)
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    expected = spoken(speaker)
    monkeypatch.setenv("HOME", str(speaker.parent))
    (speaker / "special_tokens_map.json").write_text("{}")
    _, folder, output = export_run(f"from_run='~/{speaker.name}'", f"format={form}")
    if form == "hf":
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(folder)("naïve café")["input_ids"]
        assert tokens == list(load_tokenizer(speaker).encode("naïve café")) and len(tokens) < 12
    assert (folder / "special_tokens_map.json").read_text() == "{}"
    shutil.rmtree(speaker)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    assert spoken(elsewhere) == expected and expected.startswith("def é"), output
    assert str(tmp_path) not in (elsewhere / ".hydra" / "config.yaml").read_text()


@pytest.mark.engine("transformers")
def test_special_tokens_and_how_text_is_made_come_back_out(train, export_run, tmp_path):
    """init_from a folder of transformers, trained, exported: as it came in."""
    from transformers import (
        AutoTokenizer,
        GenerationConfig,
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
    )

    source = tmp_path / "theirs"
    library = Tokenizer(models.BPE({"a": 0, "b": 1, "<s>": 2, "</s>": 3, "<pad>": 4}, []))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, padding_side="left", model_max_length=12, **special
    )
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(source)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_head=2, n_layer=2, n_positions=16))
    net.generation_config = GenerationConfig(bos_token_id=2, eos_token_id=3, max_new_tokens=7)
    net.save_pretrained(source)
    shape = ("model.vocab_size=61", "model.d_model=32", "model.n_heads=2", "model.n_layers=2",
             "model.max_seq_len=16", "model.activation=gelu_tanh")  # fmt: skip
    run = train(f"init_from={source}", *shape, "trainer.max_steps=1", "logger=none")
    assert run.code == 0, run.err
    for file in source.iterdir():  # all that an export needs is in the run's folder
        file.unlink()
    code, folder, output = export_run(f"from_run={run.folder}", "format=hf")
    assert code == 0, output
    back = AutoTokenizer.from_pretrained(folder)
    assert {key: getattr(back, key) for key in special} == special, output
    assert back.chat_template == tokenizer.chat_template
    assert (back.padding_side, back.model_max_length) == ("left", 12)
    assert back("abba")["input_ids"] == tokenizer("abba")["input_ids"]
    made = GPT2LMHeadModel.from_pretrained(folder)
    assert (made.config.bos_token_id, made.config.eos_token_id) == (2, 3)
    assert made.config.pad_token_id == made.generation_config.pad_token_id == 4  # the tokenizer's
    assert made.generation_config.max_new_tokens == 7


@pytest.mark.engine("transformers")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_exported_net_stops_at_the_end_token_of_its_data(train, export_run, tmp_path, tokenizer):
    """Documents of one letter: the end token follows each, and transformers stops there."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    records = tmp_path / "letters.jsonl"
    records.write_text('{"text": "a"}\n' * 400)
    end = "data.end_of_document=" + ("true" if tokenizer == "bytes" else "null")
    run = train(
        "data=text", f"data.path={records}", f"data.tokenizer={tokenizer}", end,
        "data.documents=masked", "model.vocab_size=257", "optimizer.lr=0.01",
        "scheduler.warmup_steps=5", "trainer.max_steps=40", "logger=none", "callbacks=none",
    )  # fmt: skip
    assert run.code == 0, run.err
    code, folder, output = export_run(f"from_run={run.folder}", "format=hf")
    assert code == 0, output
    net, reader = GPT2LMHeadModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    end_id = 255 if tokenizer == "bytes" else 256
    prompt = [end_id, *reader("a")["input_ids"]]  # training documents begin with this token
    made = net.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert made[0].tolist() == [*prompt, end_id]
    assert net.config.eos_token_id == net.generation_config.eos_token_id == end_id
