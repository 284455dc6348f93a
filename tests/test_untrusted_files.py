"""Only tensors and plain values are read from untrusted checkpoints, weights and token files."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import gptrain
from gptrain.assemble.weights import load_weights
from gptrain.checkpoints.manifest import read_manifest, seal
from gptrain.data import TextDataset, TokenDataset
from gptrain.data.tokenizers import load_tokenizer
from gptrain.models import SimpleGPT
from tests.untrusted import (
    MODEL,
    SIZES,
    Payload,
    config,
    fill,
    plant,
    refused,
    victim_and_payloads,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch):
    with victim_and_payloads(tmp_path, monkeypatch) as folder:
        yield folder


# C. Checkpoints


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


FILES = {
    "k01": lambda: saved({"state_dict": Payload()}),
    "k05": lambda: pickle.dumps(Payload(), protocol=2),
    "legacy": lambda: pickle.dumps([Payload()], protocol=4),
    "empty": lambda: b"",
    "list": lambda: saved([1, 2]),
    "no tensors": lambda: saved({"state_dict": {"a": "b"}, "callbacks": 5}),
    "callbacks": lambda: saved({"state_dict": 5, "callbacks": [1]}),
}  # fmt: skip


@pytest.mark.parametrize("attack", FILES)
def test_a_sealed_checkpoint_and_a_bare_file_hold_tensors_or_are_refused(attack, world):
    content = FILES[attack]()
    plant(world / "old", content)
    (world / "x.ckpt").write_bytes(content)
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))
    for source in (world / "old", world / "x.ckpt"):
        refused(lambda source=source: load_weights(SimpleGPT(**SIZES), source))


MANIFESTS = {
    "k11": {"files": {"../../../proc/self/mem": {"bytes": 1, "sha256": ""}}},
    "k13": {"step": "1"}, "k13b": {"run_id": 5}, "k14": {"files": [1]}, "k16": {"files": {"f": {}}},
    "k17": {"step": 2**70}, "kind": {"kind": "other"}, "metrics": {"metrics": {"val/loss": [1]}},
    "sharded": {"kind": "sharded"}, "step": {"step": 2}, "format": {"format": 2},
}  # fmt: skip


@pytest.mark.parametrize("attack", MANIFESTS)
def test_a_manifest_with_unexpected_content_is_refused(attack, world):
    path = plant(world / "old", **MANIFESTS[attack])
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))
    refused(lambda: gptrain.load(path))


@pytest.mark.parametrize("attack", ["k01", "callbacks", "k13", "k16"])
def test_resuming_from_an_untrusted_checkpoint_ends_in_one_line(attack, world, train):
    folder = world / "run"
    plant(folder, FILES[attack]() if attack in FILES else None, **MANIFESTS.get(attack, {}))
    run = train("ckpt_path=last", "allow_changes=[model,data,seed,module,optimizer,scheduler]")
    assert run.code == 65 and "Traceback" not in run.err and "error: " in run.err, run.err


@pytest.mark.parametrize("attack", ["k01", "callbacks"])
def test_exporting_an_untrusted_checkpoint_ends_in_one_line(attack, world, monkeypatch, capfd):
    from gptrain.export.__main__ import main

    plant(world / "old", FILES[attack]())
    fill(config(world / "old", {}) / ".hydra", {"overrides.yaml": b"[model=gpt_nano]"})
    monkeypatch.setattr("sys.argv", ["export", f"from_run={world / 'old'}"])
    with pytest.raises(SystemExit) as left:
        main()
    output = capfd.readouterr().err
    assert left.value.code == 65 and "Traceback" not in output, output


def sharded(folder: Path, change: Callable[[Path], None]) -> Path:
    """Write a sealed torch.distributed.checkpoint folder, apply `change`, and return the folder."""
    draft = folder / "draft"
    dcp.save({"net": SimpleGPT(**SIZES).state_dict()}, checkpoint_id=draft)
    change(draft)
    path = plant(folder, kind="sharded")
    (path / "state.ckpt").unlink()
    entries = {}
    for file in sorted(draft.iterdir()):
        content = file.read_bytes()
        (path / file.name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entries[file.name] = {"bytes": len(content), "sha256": digest}
    (path / "manifest.json").write_bytes(seal(read_manifest(path) | {"files": entries}))
    return path


def index(change: Callable[[object], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return apply


def everywhere(**changes: object) -> Callable[[Path], None]:
    def change(metadata: object) -> None:
        for entry in metadata.storage_data.values():
            for key, value in changes.items():
                object.__setattr__(entry, key, value)

    return index(change)


def raw_index(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / ".metadata").write_bytes(content) and None


def as_bytes(metadata: object) -> None:
    for name in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
    metadata.storage_data = {dcp.metadata.MetadataIndex(i.fqn): e
                             for i, e in metadata.storage_data.items()}  # fmt: skip


def evil_shards(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(saved(Payload()))
    everywhere(offset=0, length=10_000)(folder)


def evil_values(folder: Path) -> None:
    evil_shards(folder)
    index(as_bytes)(folder)


SHARDS = {
    "dcp01": index(lambda _: Payload()),
    "dcp03": raw_index(b"cos\nsystem\n(S'touch $MARK'\ntR."),
    "dcp05": evil_values,
    "dcp06": evil_shards,
    "dcp08": everywhere(relative_path="../../../victim/kept"),
    "dcp10": everywhere(relative_path=5),
    "dcp11": index(lambda metadata: setattr(metadata, "storage_data", [1, 2])),
    "offset": everywhere(offset=-5, length="x"),
    "state": index(lambda metadata: setattr(metadata, "state_dict_metadata", None)),
    "empty": raw_index(b""),
}


@pytest.mark.parametrize("attack", SHARDS)
def test_shards_hold_only_tensors_and_their_index_is_data(attack, world):
    sharded(world / "old", SHARDS[attack])
    folder = config(world / "old", {"model": MODEL})
    refused(lambda: gptrain.load(folder))


def test_intact_shards_load(world):
    sharded(world / "old", lambda _: None)
    assert isinstance(gptrain.load(config(world / "old", {"model": MODEL})), SimpleGPT)


# D. Weights in the layout of Hugging Face, tokens, tokenizers


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


INDEX = "model.safetensors.index.json"
WEIGHTS = {
    "h01": {"model.safetensors": (2**60).to_bytes(8, "little")},
    "h04": {"model.safetensors": header(
        b'{"t":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,0]}}')},
    "h05": {INDEX: b'{"weight_map": {"a": "../../../etc/hostname"}}'},
    "h05b": {INDEX: b'{"weight_map": {"a": "/etc/hostname.safetensors"}}'},
    "h06": {INDEX: json.dumps({"weight_map": {"a": INDEX}}).encode()},
    "types": {INDEX: b'{"weight_map": {"a": 5, "b": [1]}}'},
}  # fmt: skip
for name, content in {"h10": b"[1]", "h10b": b'{"n_layer": "x", "n_head": []}',
                      "h10f": b'{"n_layer": 1e400}'}.items():  # fmt: skip
    WEIGHTS[name] = {"model.safetensors": header(b"{}"), "config.json": content}


@pytest.mark.parametrize("attack", WEIGHTS)
def test_a_folder_of_weights_is_data(attack, world):
    folder = fill(world / "hf", WEIGHTS[attack])
    refused(lambda: load_weights(SimpleGPT(**SIZES), folder))


@pytest.mark.parametrize("content", ["../victim/kept", b"abc"])
def test_untrusted_prepared_text_is_data(content, world):
    files = {"tokenizer.json": b'{"type": "bytes"}\n', "train.bin": content}
    folder = fill(world / "cache", files)
    refused(lambda: TextDataset(folder, "train", 8))
    refused(lambda: TextDataset(folder, "val", 8))


TOKENS = {"t01": (20240520, 1, 2**31 - 1), "t02": (20240520, 1, -5), "version": (20240520, 9, 1)}


@pytest.mark.parametrize("attack", TOKENS)
def test_untrusted_token_files_are_data(attack, world):
    words = [*TOKENS[attack], *[0] * 253]
    content = b"".join(word.to_bytes(4, "little", signed=True) for word in words) + bytes(64)
    file = fill(world / "tokens", {"x.bin": content}) / "x.bin"
    refused(lambda: TokenDataset(file, 8, vocab_size=256))


@pytest.mark.parametrize("content", [b"{}", b'{"model": {"vocab": 5}}', b'{"type": "bytes"'])
def test_an_untrusted_tokenizer_is_data(content, world):
    folder = fill(world / "tok", {"tokenizer.json": content})
    refused(lambda: load_tokenizer(folder))
    refused(lambda: load_tokenizer(folder / "tokenizer.json"))
