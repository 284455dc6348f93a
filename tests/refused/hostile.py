"""Files that another person could have written to harm the user, and a victim to be harmed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml

from gptrain.checkpoints.manifest import read_manifest, seal
from gptrain.checkpoints.store import CheckpointStore
from gptrain.models import SimpleGPT

SIZES = {"vocab_size": 256, "d_model": 4, "n_heads": 1, "n_layers": 1, "max_seq_len": 32,
         "dropout": 0.0, "activation": "gelu"}  # fmt: skip
MODEL = {"_target_": "gptrain.models.SimpleGPT", **SIZES}
# A command that builds this net.
NET = " ".join(f"model.{key}={value}" for key, value in SIZES.items())


class Payload:
    """An object whose unrestricted unpickling creates the file $MARK."""

    def __reduce__(self):
        return os.system, (f"touch {os.environ['MARK']}",)


def contents(folder: Path) -> dict[str, tuple]:
    return {
        str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@contextmanager
def victim_and_payloads(folder: Path, monkeypatch) -> Iterator[None]:
    """Enter a folder with a victim's files and armed payloads, and check both afterwards."""
    mark, victim = folder / "ran", folder / "victim"
    monkeypatch.setenv("MARK", str(mark))
    monkeypatch.setenv("BROWSER", "touch $MARK %s")
    code = b"import os\nos.system('touch $MARK')\nfrom torch import nn\nclass Net(nn.Module): ...\n"
    names = ("evilpkg.py", "hubconf.py", "sitecustomize.py", "old/__init__.py", "old/evil.py")
    fill(
        folder, {"victim/kept": b"kept", "evil.pt": saved(Payload()), **dict.fromkeys(names, code)}
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = contents(victim)
    yield
    assert not mark.exists() and contents(victim) == before


def fill(folder: Path, files: dict[str, bytes | str]) -> Path:
    """Write files into a folder and return the folder; a str is the target of a symbolic link."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(content) if isinstance(content, str) else path.write_bytes(content)
    return folder


def config(folder: Path, content: object) -> Path:
    """Write the config of a run folder: a text, or values."""
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    return fill(folder, {".hydra/config.yaml": text.encode()})


def saved(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def plant(folder: Path, state: bytes | None = None, **changes: object) -> Path:
    """Write a sealed checkpoint with these bytes, or the weights of a small GPT; return its folder.

    Args:
        changes: Entries of the manifest to replace.
    """
    folder.mkdir(exist_ok=True)
    store = CheckpointStore(folder / "checkpoints", "run")
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        file.write(state or saved({"state_dict": SimpleGPT(**SIZES).state_dict()}))
    path = store.newest()
    (path / "manifest.json").write_bytes(seal(read_manifest(path) | changes))
    return path


def plant_shards(folder: Path, change: Callable[[Path], None]) -> None:
    """Write a sealed checkpoint of torch.distributed.checkpoint that `change` has edited."""
    draft = folder / "draft"
    dcp.save({"net": SimpleGPT(**SIZES).state_dict()}, checkpoint_id=draft)
    change(draft)
    path = plant(folder, kind="sharded")
    (path / "state.ckpt").unlink()
    entries = {}
    for file in sorted(draft.iterdir()):
        content = file.read_bytes()
        (path / file.name).write_bytes(content)
        entries[file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_bytes(seal(read_manifest(path) | {"files": entries}))


def index(change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Return an edit of the index of the shards: `change` edits it, or returns another one."""

    def apply(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return apply


def everywhere(**changes: object) -> Callable[[Path], None]:
    def change(metadata: Any) -> None:
        for entry in metadata.storage_data.values():
            for key, value in changes.items():
                object.__setattr__(entry, key, value)

    return index(change)


def raw_index(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / ".metadata").write_bytes(content) and None


def evil_shards(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(saved(Payload()))
    everywhere(offset=0, length=10_000)(folder)


def evil_values(folder: Path) -> None:
    def as_bytes(metadata: Any) -> None:
        for name in metadata.state_dict_metadata:
            metadata.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
        entries = metadata.storage_data.items()
        metadata.storage_data = {dcp.metadata.MetadataIndex(i.fqn): e for i, e in entries}

    evil_shards(folder)
    index(as_bytes)(folder)


STATES = {
    "a payload": lambda: saved({"state_dict": Payload()}),
    "a pickle": lambda: pickle.dumps(Payload(), protocol=2),
    "a newer pickle": lambda: pickle.dumps([Payload()], protocol=4),
    "a list": lambda: saved([1, 2]),
    "no tensors": lambda: saved({"state_dict": {"a": "b"}, "callbacks": 5}),
    "no dict": lambda: saved({"state_dict": 5, "callbacks": [1]}),
}
MANIFESTS = {
    "outside": {"files": {"../../../proc/self/mem": {"bytes": 1, "sha256": ""}}},
    "step": {"step": "1"}, "run_id": {"run_id": 5}, "files": {"files": [1]},
    "file": {"files": {"f": {}}}, "large step": {"step": 2**70}, "kind": {"kind": "other"},
    "metrics": {"metrics": {"val/loss": [1]}}, "sharded": {"kind": "sharded"},
    "other step": {"step": 2}, "format": {"format": 2},
}  # fmt: skip
SHARDS = {
    "payload": index(lambda _: Payload()),
    "opcodes": raw_index(b"cos\nsystem\n(S'touch $MARK'\ntR."),
    "values": evil_values,
    "tensors": evil_shards,
    "outside": everywhere(relative_path="../../../victim/kept"),
    "path": everywhere(relative_path=5),
    "list": index(lambda metadata: setattr(metadata, "storage_data", [1, 2])),
    "offset": everywhere(offset=-5, length="x"),
    "state": index(lambda metadata: setattr(metadata, "state_dict_metadata", None)),
    "empty": raw_index(b""),
}


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


INDEX = "model.safetensors.index.json"
HUGE = b'{"t":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,0]}}'
# Folders in the layout of transformers.
WEIGHTS = {
    "long header": {"model.safetensors": (2**60).to_bytes(8, "little")},
    "huge tensor": {"model.safetensors": header(HUGE)},
    "up": {INDEX: b'{"weight_map": {"a": "../../../etc/hostname"}}'},
    "absolute": {INDEX: b'{"weight_map": {"a": "/etc/hostname.safetensors"}}'},
    "circle": {INDEX: json.dumps({"weight_map": {"a": INDEX}}).encode()},
    "types": {INDEX: b'{"weight_map": {"a": 5, "b": [1]}}'},
} | {
    name: {"model.safetensors": header(b"{}"), "config.json": name.encode()}
    for name in ("[1]", '{"n_layer": "x", "n_head": []}', '{"n_layer": 1e400}')
}
