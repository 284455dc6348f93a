"""Data and checkpoints that the run reads: there, whole, and fitting; by their headers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gptrain.config.checks.run import Run
from gptrain.config.checks.world import check_steps, global_batch
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND

TEXT = "gptrain.data.TextDataset.from_corpus"
TOKENS = "gptrain.data.TokenDataset"
PATH_KEYS = ("data.path", "data.train_path", "data.val_path")


def check_paths(run: Run) -> None:
    """Files that are named exist and can be read; standard library only."""
    for key in PATH_KEYS:
        for path in _listed(run.get(key)):
            _check_path(run, key, path)
    tokenizer = run.get("data.tokenizer")
    if tokenizer not in (None, "bytes", "bpe"):
        _check_tokenizer(run, tokenizer)
    elif tokenizer == "bpe":
        _need_library(run)
    for key in ("ckpt_path", "init_from", "from_run"):
        path = run.get(key)
        if path is None or (key == "ckpt_path" and path in ("last", "best")):
            continue
        if not os.path.exists(os.path.expanduser(path)):
            newest = _newest_checkpoint(run)
            run.error(
                key,
                "no such file or folder" + (f"; newest here: {newest}" if newest else ""),
                attempt="ckpt_path=last" if key == "ckpt_path" else f"{key}=null",
                code=INPUT_NOT_FOUND,
            )


def check_contents(run: Run, cfg: DictConfig) -> None:
    """Token files by their headers, and the checkpoint that the run goes on from."""
    _check_token_files(run)
    _check_corpus(run)
    if not run.wrong:
        _check_checkpoint(run, cfg)


def _check_path(run: Run, key: str, path: str) -> None:
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        import glob

        if glob.glob(path, recursive=True):
            return
        run.error(
            key,
            "no such file or folder" if run.get(key) == path else f"{path}: no such file or folder",
            attempt=f"{key}=<file or folder>, or data=dummy_text",
            code=INPUT_NOT_FOUND,
        )
    elif not os.access(path, os.R_OK):
        run.error(key, f"{path}: no permission to read it", code=INPUT_NOT_FOUND)
    elif os.path.isfile(path) and os.path.getsize(path) == 0:
        run.error(key, f"0 tokens, {path} is empty; need at least seq_len+1", code=BAD_DATA)


def _check_tokenizer(run: Run, tokenizer: str) -> None:
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        run.error(
            "data.tokenizer",
            "no such file",
            allowed="bytes, bpe, or a tokenizer.json",
            attempt="data.tokenizer=bytes",
            code=INPUT_NOT_FOUND,
        )
        return
    try:
        size = _tokenizer_size(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        run.error("data.tokenizer", f"no tokenizer.json: {reason}", code=BAD_DATA)
        return
    vocabulary = run.get("model.vocab_size")
    if vocabulary and size > vocabulary:
        run.error(
            "data.tokenizer",
            f"tokenizer has {size} tokens, model.vocab_size={vocabulary}",
            attempt=f"model.vocab_size={-(-size // 64) * 64}",
        )
    _need_library(run)


def _tokenizer_size(content: dict[str, Any]) -> int:
    """Tokens of a tokenizer.json: its highest number and one."""
    if content.get("type") == "bytes":
        return 256
    vocabulary = content["model"]["vocab"]
    numbers = list(vocabulary.values()) if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    numbers += [token["id"] for token in content.get("added_tokens", [])]
    return max(numbers) + 1


def _need_library(run: Run) -> None:
    if find_spec("tokenizers") is None:
        run.error(
            "data.tokenizer",
            "needs the package tokenizers",
            attempt="pip install 'gptrain[text]', or data.tokenizer=bytes",
        )


def _check_token_files(run: Run) -> None:
    if run.get("data.train._target_") != TOKENS:
        return
    from gptrain.data import DataError
    from gptrain.data.token_files import (
        count_windows,
        find_token_files,
        open_token_file,
        sample_tokens,
    )

    seq_len, dtype = run.get("data.seq_len"), run.get("data.dtype")
    vocabulary = run.get("model.vocab_size")
    for part in ("train", "val", "test"):
        path = run.get(f"data.{part}.path")
        if path is None:
            continue
        key = f"data.{part}_path" if run.has(f"data.{part}_path") else f"data.{part}.path"
        if key in run.wrong:
            continue
        windows = tokens = 0
        try:
            for file in find_token_files(path):
                _check_manifest(file)
                opened = open_token_file(file, dtype)
                tokens += opened.n_tokens
                windows += count_windows(opened.n_tokens, seq_len or 1)
                if vocabulary:
                    sample_tokens(opened, vocabulary)
        except FileNotFoundError as error:
            run.error(key, str(error), code=INPUT_NOT_FOUND)
            continue
        except (DataError, OSError) as error:
            run.error(key, str(error), code=BAD_DATA)
            continue
        if not windows:
            need = (seq_len or 1) + 1
            run.error(key, f"{tokens} tokens; need at least seq_len+1 = {need}", code=BAD_DATA)
        elif part == "train" and (batch := global_batch(run)):
            check_steps(run, batch, windows, key, code=BAD_DATA)


def _check_manifest(file: Path) -> None:
    """Raises DataError if a file is not the one that was prepared, as its manifest knows."""
    if not (file.parent / "manifest.json").exists() or file.name not in ("train.bin", "val.bin"):
        return
    from gptrain.data import PreparedText

    PreparedText.load(file.parent).check()


def _check_corpus(run: Run) -> None:
    if run.get("data.train._target_") != TEXT or run.get("data.path") is None:
        return
    from gptrain.data import DataError
    from gptrain.data.corpus import find_documents

    try:
        documents = find_documents(run.get("data.path"), run.get("data.pattern") or "*")
    except FileNotFoundError as error:
        run.error("data.path", str(error), code=INPUT_NOT_FOUND)
        return
    except (DataError, OSError) as error:
        run.error("data.path", str(error), code=BAD_DATA)
        return
    n_bytes, need = sum(doc.size_bytes for doc in documents), (run.get("data.seq_len") or 1) + 1
    if run.get("data.tokenizer") == "bytes" and n_bytes < need:
        run.error("data.path", f"{n_bytes} tokens; need at least seq_len+1 = {need}", code=BAD_DATA)


def _check_checkpoint(run: Run, cfg: DictConfig) -> None:
    """A checkpoint that is named by its path; `last` and `best` are looked for when the job runs,
    under the lock of their folder."""
    named = run.get("ckpt_path")
    if named is None or named in ("last", "best"):
        return
    from gptrain.assemble.resume import checkpoint_folder, count_sequences, differences
    from gptrain.resilience.manifest import MANIFEST_NAME, DamagedCheckpoint, folder_name
    from gptrain.resilience.safe_load import UnsafeCheckpoint, load_file
    from gptrain.resilience.status import CHECKPOINTS_NAME
    from gptrain.resilience.store import CheckpointStore

    path = checkpoint_folder(named)
    store = CheckpointStore(path.parent)
    try:
        if path.is_file():
            load_file(path)
            wrong = "a file alone, no checkpoint of a run; its weights can be started from"
            run.error("ckpt_path", wrong, attempt=f"init_from={named}", code=BAD_DATA)
            return
        for folder in (path, path / CHECKPOINTS_NAME):
            newest = CheckpointStore(folder).newest()
            if newest is not None and not (path / MANIFEST_NAME).exists():
                wrong = "a run folder, not a checkpoint"
                run.error("ckpt_path", wrong, attempt=f"ckpt_path={newest}", code=BAD_DATA)
                return
        found = store.verify(path)
    except (DamagedCheckpoint, UnsafeCheckpoint, OSError) as error:
        others = [step for step in store.steps() if store.folder / folder_name(step) != path]
        attempt = "ckpt_path=last" if others else ""
        run.error("ckpt_path", _reason(error, path), attempt=attempt, code=BAD_DATA)
        return
    batch = count_sequences(cfg, run.world_size)
    run.problems += differences(cfg, found.manifest["config"], batch)


def _reason(error: Exception, path: Path) -> str:
    """What was found, without the path that the line begins with."""
    return str(error).removeprefix(f"{path}: ")


def _newest_checkpoint(run: Run) -> Path | None:
    root = run.get("output_dir")
    if not isinstance(root, str) or not os.path.isdir(root):
        return None
    found = Path(root).glob("*/*/checkpoints/step-*/manifest.json")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None


def _listed(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (item for item in value if isinstance(item, str))
