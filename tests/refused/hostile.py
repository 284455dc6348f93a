"""Files that another person could have written to harm the user, and a victim to be harmed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
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


def plant(folder: Path, contents: dict[str, bytes] | None = None, **changes: object) -> Path:
    """Write a sealed checkpoint with the weights of a small GPT; return its folder.

    Args:
        contents: Contents of files of the checkpoint, by name, to replace.
        changes: Entries of the manifest to replace.
    """
    folder.mkdir(exist_ok=True)
    store = CheckpointStore(folder / "checkpoints", "run")
    store.save(1, {"model": SimpleGPT(**SIZES).state_dict()}, {})
    path = store.newest()
    manifest = read_manifest(path).model_dump()
    for name, content in (contents or {}).items():
        (path / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"bytes": len(content), "sha256": sha256}
    (path / "manifest.json").write_bytes(seal(manifest | changes))
    return path


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
    "file": {"files": {"f": {}}}, "large step": {"step": 2**70},
    "metrics": {"metrics": {"val/loss": [1]}}, "other step": {"step": 2},
    "format": {"format": 3}, "old format": {"format": 1},
}  # fmt: skip


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


HEADER = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def sharded(text: str) -> dict:
    """Return the header of a file with one tensor, and with this text for its place."""
    return {"__metadata__": {"DCP_SHARDING_INFO": text}, "a": HEADER}


SHARDS = {
    name: header(json.dumps(text).encode()) + bytes(8)
    for name, text in {
        "offsets": sharded('{"a": {"saved_offsets": "x"}}'),
        "list": sharded("[1, 2]"),
        "no json": sharded("{"),
        "far": sharded('{"a": {"saved_offsets": [1099511627776]}}'),
        "before": sharded('{"a": {"saved_offsets": [-5]}}'),
        "other": sharded('{"a": 5}'),
        "dtype": {"a": HEADER | {"dtype": "F4"}},
    }.items()
} | {"a pickle": b"cos\nsystem\n(S'touch $MARK'\ntR.", "empty": b""}
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
