"""Where weights come from, a run, a checkpoint, a GPT-2 folder or a file, and into the net."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor, nn

from gptrain.assemble.resume import choose_checkpoint
from gptrain.parallel.state import NO_ALIASES, load_sharded_net, load_whole_net_state
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError, Problem
from gptrain.resilience.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    DamagedCheckpoint,
    NoGoodCheckpoint,
)
from gptrain.resilience.safe_load import SafeFileSystemReader, UnsafeCheckpoint, load_file
from gptrain.resilience.status import CHECKPOINTS_NAME
from gptrain.resilience.store import CheckpointStore
from gptrain.small_files import UnreadableFile, read_json

log = logging.getLogger(__name__)
STATE_NAME = "state.ckpt"  # of a full checkpoint
SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"  # of weights in several files, as transformers writes them


def load_weights(
    net: nn.Module,
    source: str | Path | Checkpoint,
    *,
    monitor: str = "val/loss",
    aliases: Mapping[str, str] = NO_ALIASES,
    stages: Any = None,
) -> Path:
    """Fills net, as this rank holds it, with the weights of source; returns where they were.

    Args:
        source: a run folder (its best checkpoint by `monitor`, or its newest where none was
            measured), a checkpoint's folder or file, a folder in the layout of Hugging Face's
            GPT-2 (in one file or several), or a safetensors file of the net's own names.
        aliases, stages: as in `gptrain.parallel.state`.

    Raises:
        FileNotFoundError: nothing there that holds weights.
        DamagedCheckpoint, UnsafeCheckpoint: it is there and must not be taken.
        ValueError: one line that names both sides of all that does not fit.
    """
    found = source if isinstance(source, Checkpoint) else find_weights(source, monitor)
    path = found.path if isinstance(found, Checkpoint) else found
    options = {"aliases": aliases, "stages": stages}
    try:
        if isinstance(found, Checkpoint) and found.manifest["kind"] == "sharded":
            load_sharded_net(net, SafeFileSystemReader(path), **options)
            return path
        from_others = path.suffix == ".safetensors" or path.name == INDEX
        tensors = read_safetensors(path) if from_others else _read_state(path)
        config = path.parent / "config.json"
        if path.name in (SAFETENSORS, INDEX) and config.exists():
            tensors = _from_gpt2(net, config, tensors)
        load_whole_net_state(net, tensors, **options)
        return path
    except UnreadableFile as error:
        raise DamagedCheckpoint(error.path, error.reason) from error
    except ValueError as error:
        raise ValueError(f"{path} does not fit the net: {error}") from error


def start_from(cfg: DictConfig, net: nn.Module, pipeline: Any = None) -> None:
    """Fills the net, as this rank holds it, with the weights that init_from names.

    Args:
        pipeline: that the net is a stage of (`gptrain.parallel.pipeline`).

    Raises: ConfigError with code 65 (damaged, or of another shape) or 66 (not found).
    """
    stage = {"aliases": pipeline.aliases, "stages": pipeline.group} if pipeline else {}
    try:
        path = load_weights(net, cfg.init_from, monitor=cfg.checkpoint.monitor, **stage)
    except FileNotFoundError as error:
        problem = Problem("init_from", cfg.init_from, str(error), code=INPUT_NOT_FOUND)
        raise ConfigError([problem]) from error
    except (DamagedCheckpoint, NoGoodCheckpoint, UnsafeCheckpoint, ValueError) as error:
        wrong = str(error).removeprefix(f"{Path(cfg.init_from).expanduser()}: ")
        problem = Problem("init_from", cfg.init_from, wrong, code=BAD_DATA)
        raise ConfigError([problem]) from error
    log.info("%-9s from the weights of %s", "start", path)


def find_weights(source: str | Path, monitor: str = "val/loss") -> Checkpoint | Path:
    """The verified checkpoint, or the file of another origin, that source means.

    Raises: FileNotFoundError, DamagedCheckpoint.
    """
    source = Path(source).expanduser()
    if (source / CHECKPOINTS_NAME).is_dir():
        return choose_checkpoint(source, "best", monitor)
    if source.name == STATE_NAME and (source.parent / MANIFEST_NAME).exists():
        source = source.parent
    if (source / MANIFEST_NAME).exists():
        return CheckpointStore(source.parent).verify(source)
    if source.is_file():
        return source
    for name in (SAFETENSORS, INDEX):
        if (source / name).exists():
            return source / name
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or folder")
    raise FileNotFoundError(
        f"{source}: no weights in it: neither {CHECKPOINTS_NAME}/ nor {MANIFEST_NAME} "
        f"nor {SAFETENSORS}"
    )


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all files that an index names, mapped from them.

    Raises: DamagedCheckpoint.
    """
    from safetensors import SafetensorError  # an extra: only these files need it
    from safetensors.torch import load_file as load_safetensors

    if path.name == INDEX:
        return {k: v for part in _indexed(path) for k, v in read_safetensors(part).items()}
    try:
        return load_safetensors(path)
    except SafetensorError as error:
        raise DamagedCheckpoint(path, f"not a safetensors file ({error})") from error


def _indexed(index: Path) -> list[Path]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise DamagedCheckpoint(index, "not an index of safetensors files: it has no weight_map")
    parts = []
    for name in sorted(set(map(str, names.values()))):
        if Path(name).name != name or not name.endswith(".safetensors"):  # nor an index again
            raise DamagedCheckpoint(index, f"names {name}, which is no safetensors file beside it")
        if not (index.parent / name).is_file():
            raise DamagedCheckpoint(index, f"names {name}, which is not there")
        parts.append(index.parent / name)
    return parts


def _read_state(path: Path) -> dict[str, Tensor]:
    content = load_file(path / STATE_NAME if path.is_dir() else path, mmap=True)
    tensors = content.get("state_dict", content) if isinstance(content, dict) else content
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise DamagedCheckpoint(path, "holds no state dict")
    return tensors


def _from_gpt2(net: nn.Module, config: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not hasattr(net, "from_gpt2"):
        raise ValueError(
            f"{config}: a folder in the layout of Hugging Face, and {type(net).__name__} has no "
            f"`from_gpt2` that reads it (see gptrain.models)"
        )
    content = read_json(config)
    if not isinstance(content, dict):
        raise UnreadableFile(config, "not the config of a net")
    return net.from_gpt2(content, tensors)
