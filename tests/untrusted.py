"""Shared parts of the attack tests: a victim's files, payloads, and the check of a refusal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

from gptrain.checkpoints.manifest import (
    AllDamagedError,
    DamagedCheckpointError,
    read_manifest,
    seal,
)
from gptrain.checkpoints.store import CheckpointStore
from gptrain.config import ConfigError
from gptrain.data import DataError
from gptrain.models import SimpleGPT

REFUSALS = (
    ConfigError, DamagedCheckpointError, AllDamagedError, DataError, FileNotFoundError,
    ValueError
)  # fmt: skip
SIZES = {"vocab_size": 256, "d_model": 4, "n_heads": 1, "n_layers": 1, "max_seq_len": 32,
         "dropout": 0.0, "activation": "gelu"}  # fmt: skip
MODEL = {"_target_": "gptrain.models.SimpleGPT", **SIZES}


class Payload:
    """An object whose unrestricted unpickling creates the file $MARK."""

    def __reduce__(self):
        return os.system, (f"touch {os.environ['MARK']}",)


def hashes(folder: Path) -> dict[str, tuple]:
    return {
        str(path): (path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@contextmanager
def victim_and_payloads(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Yield a folder with a victim's files and armed payloads.

    After the test, check that no payload ran and that the victim's files are unchanged.
    """
    mark, victim = tmp_path / "ran", tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("kept")
    monkeypatch.setenv("MARK", str(mark))
    torch.save(Payload(), tmp_path / "evil.pt")
    code = "import os\nos.system('touch $MARK')\nfrom torch import nn\nclass Net(nn.Module): ...\n"
    for name in ("evilpkg.py", "hubconf.py", "sitecustomize.py", "old/__init__.py", "old/evil.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BROWSER", "touch $MARK %s")
    before = hashes(victim)
    yield tmp_path
    assert not mark.exists() and hashes(victim) == before


def refused(call: Callable[[], object]) -> str:
    """Call the function, check that it is refused, and return the first line of the message."""
    with pytest.raises(REFUSALS) as caught:
        call()
    if type(caught.value) is ValueError:
        assert "does not fit the net" in str(caught.value)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 3 and all(len(line) < 1000 for line in lines), lines
    return lines[0]


def plant(folder: Path, state: object = None, **changes: object) -> Path:
    """Write a sealed checkpoint and return its folder.

    Args:
        folder: Run folder that receives the checkpoint.
        state: Content of state.ckpt: bytes, an object, or None for the weights of a small GPT.
        changes: Manifest entries to replace.
    """
    store = CheckpointStore(folder / "checkpoints", "run")
    folder.mkdir(exist_ok=True)
    with store.writing(1) as draft, draft.open("state.ckpt") as file:
        if isinstance(state, bytes):
            file.write(state)
        else:
            torch.save({"state_dict": SimpleGPT(**SIZES).state_dict()} if state is None else state,
                       file)  # fmt: skip
    path = store.newest()
    (path / "manifest.json").write_bytes(seal(read_manifest(path) | changes))
    return path


def config(folder: Path, content: object) -> Path:
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    (folder / ".hydra" / "config.yaml").write_text(text)
    return folder


def fill(folder: Path, files: dict[str, bytes | str]) -> Path:
    """Write files into a folder and return the folder; a str is the target of a symbolic link."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(content) if isinstance(content, str) else path.write_bytes(content)
    return folder
