"""The command `export` writes weights and tokenizer for other programs. See test_layouts."""

from __future__ import annotations

import json
import resource
import shlex
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from gptrain.assemble.companion_files import copy_tokenizer_files, write_end_token
from gptrain.assemble.run import write_tokenizer as write_run_tokenizer
from gptrain.config.cli import run_command
from gptrain.core import shell
from gptrain.core.errors import IO_ERROR, ConfigError, code_of
from gptrain.data import load_tokenizer, train_bpe
from gptrain.data.tokenizers import FILE_NAME
from gptrain.export.__main__ import DEFAULTS, ExportRun, export
from gptrain.export.files import write_companions, write_net
from tests.command_line import compose_run


@pytest.fixture
def export_run(capfd, tmp_path):
    """Runs the verb in this process; returns its exit code, its folder and what it said."""

    def run(*overrides: str, name: str = "export") -> tuple:
        folder = tmp_path / name
        words = [shell.override("run_dir", folder), *overrides]
        code = run_command(export, words, ExportRun, DEFAULTS)
        out, err = capfd.readouterr()
        return code, folder, out + err

    return run


def write_files(tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer, as for a run in the tokenizer's own folder."""
    write_companions(tokenizer, tokenizer.path.parent, folder, "hf")


def test_both_formats_start_another_run_with_the_very_weights(train, saved_twice, export_run):
    for form, dtype, mode, step in (("safetensors", "bf16", "min", 2), ("hf", "fp32", "max", 4)):
        state = saved_twice.state(step)["state_dict"]
        words = (f"from_run={saved_twice.folder}", f"format={form}", f"dtype={dtype}")
        name = f"of {form}, é=1"
        _, folder, output = export_run(*words, f"checkpoint.mode={mode}", name=name)
        weights = saved_twice.folder / "checkpoints" / f"step-{step:08d}"
        n_bytes = (folder / "model.safetensors").stat().st_size
        assert f" {weights}, {dtype}, {n_bytes / 2**20:.1f} MiB\n" in output
        stored = load_file(folder / "model.safetensors")
        python, script, *pasted = shlex.split(output.rpartition("next ")[2])  # the last line
        assert python == "python" and Path(script).name == "train.py"
        if form == "safetensors":  # the net's own names, a tied weight once
            assert state.keys() - stored.keys() == {"head.weight"}
            assert all(torch.equal(stored[name], state[name].bfloat16()) for name in stored)
            code, second_folder, output = export_run(
                words[0], "format=hf", "dtype=bf16", name="theirs"
            )
            assert code == 0, output
            net = GPT2LMHeadModel.from_pretrained(second_folder, dtype="auto")
            assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
        begun = train(
            *pasted, "optimizer.lr=1e-12", "optimizer.weight_decay=0",
            "trainer.max_steps=1", "logger=none", name=f"from_{form}",
        )  # fmt: skip
        assert begun.code == 0, begun.err
        for name, tensor in begun.state(1)["state_dict"].items():
            expected = state[name].bfloat16().float() if dtype == "bf16" else state[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_an_export_generates_the_same_text_as_its_run(
    speaker, export_run, capfd, tmp_path, form, monkeypatch
):
    """Both moved, the run gone, and its data, of which no word is needed."""
    command = pytest.importorskip("gptrain.generate.__main__")

    def spoken(source: Path) -> str:
        words = [f"from_run={source}", "prompt='def é'", "n_tokens=12"]
        code = run_command(command.generate, words, command.GenerateRun, command.DEFAULTS)
        out, err = capfd.readouterr()
        assert code == 0, err
        return out

    expected = spoken(speaker)
    monkeypatch.setenv("HOME", str(speaker.parent))
    (speaker / "special_tokens_map.json").write_text("{}")
    _, folder, output = export_run(f"from_run='~/{speaker.name}'", f"format={form}")
    assert "data.path" not in output.partition("next ")[2]  # the run folder is signed
    if form == "hf":
        tokens = AutoTokenizer.from_pretrained(folder)("naïve café")["input_ids"]
        assert tokens == list(load_tokenizer(speaker).encode("naïve café")) and len(tokens) < 12
    assert (folder / "special_tokens_map.json").read_text() == "{}"
    shutil.rmtree(speaker)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    assert spoken(elsewhere) == expected and expected.startswith("def é"), output
    assert str(tmp_path) not in (elsewhere / ".hydra" / "config.yaml").read_text()


def test_every_byte_is_its_own_token_in_the_exported_tokenizer(tmp_path):
    write_files(load_tokenizer("bytes"), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(0x250))) + "\U0001f600\r\n\tdef f(x): return x  # \x00\x7f"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_the_end_token_of_a_trained_bpe_is_that_of_the_exported_tokenizer(tmp_path):
    trained = train_bpe(["some words of a text " * 9], 280, tmp_path / FILE_NAME, has_end=True)
    write_files(trained, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == trained.end_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == trained.end_id
    assert tokenizer("some words")["input_ids"] == trained.encode("some words").tolist()


def test_non_floating_point_tensors_are_exported_unchanged(tmp_path):
    dtypes = (torch.bool, torch.int64, torch.uint8, torch.uint16)
    own = {f"{dtype}"[6:]: torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in dtypes}
    net = torch.nn.Module()
    for name, tensor in own.items():
        net.register_buffer(name, tensor)
    write_net(net, tmp_path, "safetensors", "bf16")
    read = load_file(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # older versions of transformers need it
    assert all(t.dtype == own[name].dtype and torch.equal(t, own[name]) for name, t in read.items())


def test_a_disk_that_is_full_is_an_error_of_the_disk(tmp_path):
    """Exit code 74, and nothing that looks like an export."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, before[1]))
    try:
        with pytest.raises(OSError) as full:
            write_net(torch.nn.Linear(1000, 1000), tmp_path, "safetensors", "fp32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code_of(full.value) == IO_ERROR and not list(tmp_path.iterdir())


def test_special_tokens_and_how_text_is_made_come_back_out(train, export_run, tmp_path):
    """init_from a folder of transformers, trained, exported: as it came in."""
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


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_exported_net_stops_at_the_end_token_of_its_data(train, export_run, tmp_path, tokenizer):
    """Documents of one letter: the end token follows each, and transformers stops there."""
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


def test_the_ids_of_special_tokens_come_from_wherever_the_run_has_them(tmp_path):
    """Ids come from the run or from its tokenizer, but not from another vocabulary."""
    source, run, folder = (tmp_path / name for name in ("source", "run", "folder"))
    for place in (source, run, folder):
        place.mkdir()
    library = Tokenizer(models.BPE({"a": 0, "<s>": 1, "</s>": 2, "<pad>": 3}, []))
    library.add_special_tokens(["<s>", "</s>", "<pad>"])
    for place in (source, run):
        library.save(str(place / "tokenizer.json"))
    names = {"bos_token": {"content": "<s>"}, "pad_token": "<pad>", "eos_token": "none such"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    model_ids = {"eos_token_id": [2, 0], "bos_token_id": 4, "pad_token_id": None}
    # 4: not in this vocabulary
    (source / "generation_config.json").write_text(json.dumps(model_ids))
    copy_tokenizer_files([tmp_path / "nothing.json", source], run)
    (folder / "config.json").write_text('{"vocab_size": 4, "eos_token_id": null}')
    write_companions(load_tokenizer(run), run, folder, "hf")
    ids = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 3}
    assert json.loads((folder / "config.json").read_text()) == {"vocab_size": 4, **ids}
    assert json.loads((folder / "generation_config.json").read_text()) == ids


def test_a_run_gets_the_tokenizer_of_its_weights_unless_it_has_one(tmp_path):
    source, second, run, other = (tmp_path / name for name in ("source", "second", "run", "other"))
    for place in (source, second, run, other):
        place.mkdir()
    for place, template in ((source, "hello"), (second, "goodbye")):
        (place / "tokenizer.json").write_text('{"a": 0}')
        (place / "chat_template.jinja").write_text(template)
    (source / "generation_config.json").write_text(
        '{"bos_token_id": 1, "eos_token_id": 7, "top_k": 3}'
    )
    (other / "tokenizer.json").write_text('{"b": 0}')
    for place in (run, other):
        copy_tokenizer_files([tmp_path / "nothing.json", source, second, other], place)
    assert (run / "tokenizer.json").read_text() == '{"a": 0}'
    assert (run / "chat_template.jinja").read_text() == "hello"
    assert (other / "tokenizer.json").read_text() == '{"b": 0}'
    # The end token of the data precedes those of the weights.
    for end_id, ends in ((None, 7), (9, [9, 7]), (7, [7, 9])):
        if end_id is not None:
            write_end_token(run, end_id)
        ids = {"bos_token_id": 1, "eos_token_id": ends, "top_k": 3}
        assert json.loads((run / "generation_config.json").read_text()) == ids
    assert not (other / "chat_template.jinja").exists()
    # The files of `data.tokenizer` precede those of `init_from`.
    words = (f"data.tokenizer={second}", f"init_from={source}", f"run_dir={run}")
    write_run_tokenizer(compose_run("model=gpt_nano", "data=text", *words), cast(Any, None))
    assert (run / "chat_template.jinja").read_text() == "goodbye"


def test_an_export_has_the_end_token_of_its_tokenizer_and_of_its_data(
    speaker, export_run, tmp_path
):
    _, folder, output = export_run(f"from_run={speaker}", "format=hf")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == 269, output
    # Bytes have no token 256.
    generation = {"pad_token_id": 256, "eos_token_id": 9, "max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    write_files(load_tokenizer("bytes"), tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"max_new_tokens": 7, "eos_token_id": [9, 255]}


def test_an_export_goes_into_no_runs_folder(saved_twice, export_run):
    record = (saved_twice.folder / ".hydra" / "config.yaml").read_bytes()
    own = f"from_run={saved_twice.folder}"
    code, _, output = export_run(own, f"run_dir={saved_twice.folder}")
    assert code == 73 and "holds a run" in output
    assert (saved_twice.folder / ".hydra" / "config.yaml").read_bytes() == record
    assert [export_run(own, f"dtype={dtype}")[0] for dtype in ("fp32", "bf16")] == [0, 0]


def test_the_error_for_a_net_that_is_not_gpt2_names_a_format_that_works(tmp_path):
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"no `to_hugging_face`.*try: format=safetensors"):
        write_net(net, tmp_path, "hf", "fp32")
    write_net(net, tmp_path, "safetensors", "fp32")
    assert load_file(tmp_path / "model.safetensors").keys() == {"weight", "bias"}
    assert write_net(net, tmp_path, "safetensors", "bf16") == 2 * 6  # bytes of six numbers
