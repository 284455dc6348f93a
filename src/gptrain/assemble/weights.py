"""Weights of a run, a checkpoint, a folder of transformers or a file, into a net."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from gptrain.checkpoints.amendment import load_state
from gptrain.checkpoints.manifest import (
    MANIFEST_NAME,
    STATE_NAME,
    Checkpoint,
    DamagedCheckpointError,
    NoGoodCheckpointError,
)
from gptrain.checkpoints.safe_load import SafeFileSystemReader, load_file
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import CheckpointConfig, RunConfig
from gptrain.core.small_files import UnreadableFileError, open_regular, read_json
from gptrain.parallel.state import EXTRA_PREFIX, NO_STAGES, Stages, load_net_state
from gptrain.parallel.unmatched import Unmatched

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestBy:
    """Metric of the best checkpoint of a run whose config is not at hand."""

    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"


VAL_LOSS = BestBy()
SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"  # of weights in several files, as transformers writes them


def find_weights(
    source: str | Path, which: str = "best", by: BestBy | CheckpointConfig = VAL_LOSS
) -> Checkpoint | Path:
    """The verified checkpoint, or the file of another origin, that source means.

    Nothing is renamed or removed, a damaged checkpoint neither: its run may still be going on.

    Args:
        which: of a run folder the checkpoint with the "best" metric (the newest where none was
            measured), or the "last" that is whole.
        by: the metric, and whether its min or its max is best: a `checkpoint` group.
    Raises: FileNotFoundError, DamagedCheckpointError, NoGoodCheckpointError.
    """
    source = Path(source).expanduser()
    if (source / CHECKPOINTS_NAME).is_dir():
        store = CheckpointStore(source / CHECKPOINTS_NAME)
        best = store.best(by.monitor, by.mode) if which == "best" else None
        if found := best or store.newest_good():
            return found
    folder = source.parent if source.name == STATE_NAME else source
    if (folder / MANIFEST_NAME).exists():
        return CheckpointStore(folder.parent).verify(folder)
    for file in (source, source / SAFETENSORS, source / INDEX):
        if file.is_file():
            return file
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or folder")
    known = f"no {CHECKPOINTS_NAME}/step-*, no {MANIFEST_NAME}, no {SAFETENSORS}"
    raise FileNotFoundError(f"no checkpoint in {source}, and no weights in it: {known}")


@contextmanager
def named_source(key: str, value: str, misfit: str = "") -> Generator[None, None, None]:
    """A ConfigError says which key names what is not there (66), or cannot be taken (65).

    Args:
        misfit: what to try where the weights are of another net.
    """
    try:
        yield
    except (FileNotFoundError, DamagedCheckpointError, NoGoodCheckpointError, ValueError) as error:
        code = INPUT_NOT_FOUND if isinstance(error, FileNotFoundError) else BAD_DATA
        hint = misfit if isinstance(error, ValueError) else ""
        message = str(error).removeprefix(f"{Path(value).expanduser()}: ")
        raise ConfigError.of(key, value, message, hint=hint, code=code) from error


def load_weights(
    net: nn.Module,
    source: str | Path | Checkpoint,
    *,
    strict: bool = True,
    resizes: bool = False,
    stages: Stages = NO_STAGES,
) -> tuple[Path, Unmatched]:
    """Fills net, whole or partitioned, with the weights that source holds.

    Args:
        source: a run folder (its best checkpoint by val/loss), a checkpoint's folder or file, a
            file that Lightning saved, a folder of transformers (in one file or several), or a
            safetensors file of the net's own names.
        strict: false takes what fits by name and shape.
        resizes: Take learned positions of another number too, see `load_net_state`.
        stages: over which a pipeline partitions the net.

    Returns: where the weights were, and what of both sides was left out.
    Raises:
        FileNotFoundError: nothing there that holds weights.
        DamagedCheckpointError, UnsafeCheckpointError: it is there and must not be taken.
        ValueError: one line that names both sides of all that does not fit.
    """
    found = source if isinstance(source, Checkpoint) else find_weights(source)
    path = found.path if isinstance(found, Checkpoint) else found
    is_sharded = isinstance(found, Checkpoint) and found.manifest["kind"] == "sharded"
    try:
        state = SafeFileSystemReader(path) if is_sharded else read_weights(net, path)
        return path, load_net_state(net, state, strict=strict, resizes=resizes, stages=stages)
    except UnreadableFileError as error:
        raise DamagedCheckpointError(error.path, error.reason) from error
    except ValueError as error:
        raise ValueError(f"{path} does not fit the net: {error}") from error


def start_from(cfg: RunConfig, source: str, net: nn.Module, stages: Stages) -> None:
    """Fill the net, as this rank holds it, with the weights of `source`, which init_from names.

    A longer `model.max_seq_len` keeps the learned positions that are there.

    Raises: ConfigError with code 65 (damaged, or of another shape) or 66 (not found).
    """
    misfit = "init_strict=false to take what fits" if cfg.init_strict else ""
    with named_source("init_from", source, misfit):
        found = find_weights(source, by=cfg.checkpoint)
        path, left = load_weights(net, found, strict=cfg.init_strict, resizes=True, stages=stages)
    log.info(labels.line("start", f"from the weights of {path}"))
    for line in left.describe_positions():
        log.warning("warning: %s", line)
    if consequences := left.describe_consequences():
        log.warning("warning: init_strict=false: %s", consequences)


def read_weights(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """The tensors of a file, or of the folder of a whole checkpoint, by the net's names.

    Raises: DamagedCheckpointError, UnsafeCheckpointError, UnreadableFileError; ValueError for
    another net's.
    """
    if path.suffix != ".safetensors" and path.name != INDEX:
        return net_tensors(net, path)
    tensors, config = read_safetensors(path), path.parent / "config.json"
    if path.name not in (SAFETENSORS, INDEX) or not config.exists():
        return tensors
    if (read := getattr(net, "from_hugging_face", None)) is None:
        raise ValueError(
            f"{config}: a folder in the layout of Hugging Face, and {type(net).__name__} has no "
            f"`from_hugging_face` that reads it (see gptrain.models)"
        )
    content = read_json(config)
    if not isinstance(content, dict):
        raise DamagedCheckpointError(config, "not a mapping")
    return read(content, tensors)


def net_tensors(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """The net's tensors in a file of ours, of Lightning's or of torch.save.

    What a module calls its net may stand in front of their names; what lies beside it is left out.
    """
    content = load_state(path, mmap=True) if path.is_dir() else load_file(path, mmap=True)
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise DamagedCheckpointError(path, "holds no state dict")
    first = next(iter(net.state_dict()), "")
    fronts = [name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")]
    front = min(fronts, key=len, default="")
    held = {name.removeprefix(front): t for name, t in state.items() if name.startswith(front)}
    return {name: t for name, t in held.items() if not name.startswith(EXTRA_PREFIX)}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all files that an index names, mapped from them.

    Raises: DamagedCheckpointError.
    """
    from safetensors import SafetensorError  # an extra: only these files need it
    from safetensors.torch import load_file as load_safetensors

    if path.name == INDEX:
        return {k: v for part in _indexed(path) for k, v in read_safetensors(part).items()}
    open_regular(path).close()  # safetensors would wait for a pipe
    try:
        return load_safetensors(path)
    except SafetensorError as error:
        raise DamagedCheckpointError(path, f"not a safetensors file ({error})") from error


def _indexed(index: Path) -> list[Path]:
    content: Any = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise DamagedCheckpointError(
            index, "not an index of safetensors files: it has no weight_map"
        )
    parts = sorted(set(map(str, names.values())))
    for name in parts:
        is_beside = Path(name).name == name and (index.parent / name).is_file()
        if not is_beside or not name.endswith(".safetensors"):  # nor an index again
            raise DamagedCheckpointError(
                index, f"names {name}, which is no safetensors file beside it"
            )
    return [index.parent / name for name in parts]
