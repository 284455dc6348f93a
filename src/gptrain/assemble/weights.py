"""Where weights come from, a run, a checkpoint, a GPT-2 folder or a file, and into the net."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gptrain.assemble.resume import choose_checkpoint
from gptrain.lit.checkpointing import STATE_NAME
from gptrain.lit.strategies.states import BESIDE, NET
from gptrain.parallel.fit import tied_names
from gptrain.parallel.state import (
    NO_ALIASES,
    Unmatched,
    load_sharded_net,
    load_whole_net_state,
)
from gptrain.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.resilience.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    DamagedCheckpoint,
    NoGoodCheckpoint,
)
from gptrain.resilience.safe_load import SafeFileSystemReader, UnsafeCheckpoint, load_file
from gptrain.resilience.status import CHECKPOINTS_NAME
from gptrain.resilience.store import CheckpointStore
from gptrain.small_files import MAX_JSON_BYTES, UnreadableFile, open_regular, read_json

log = logging.getLogger(__name__)
SHOWN = 24  # names of tensors in a warning
SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"  # of weights in several files, as transformers writes them


def load_weights(
    net: nn.Module,
    source: str | Path | Checkpoint,
    *,
    monitor: str = "val/loss",
    mode: str = "min",
    strict: bool = True,
    aliases: Mapping[str, str] = NO_ALIASES,
    stages: ProcessGroup | None = None,
) -> tuple[Path, Unmatched]:
    """Fills net, whole or partitioned, with the weights that source holds.

    Args:
        source: a run folder (its best checkpoint by `monitor`, or its newest where none was
            measured), a checkpoint's folder or file, a file that Lightning saved, a folder in the
            layout of Hugging Face's GPT-2 (in one file or several), or a safetensors file of the
            net's own names.
        strict: false takes what fits by name and shape.
        aliases, stages: as in `gptrain.parallel.state`.

    Returns: where the weights were, and what of both sides was left out.
    Raises:
        FileNotFoundError: nothing there that holds weights.
        DamagedCheckpoint, UnsafeCheckpoint: it is there and must not be taken.
        ValueError: one line that names both sides of all that does not fit.
    """
    found = source if isinstance(source, Checkpoint) else find_weights(source, monitor, mode)
    path = found.path if isinstance(found, Checkpoint) else found
    options = {"strict": strict, "aliases": aliases, "stages": stages}
    try:
        if isinstance(found, Checkpoint) and found.manifest["kind"] == "sharded":
            return path, load_sharded_net(net, SafeFileSystemReader(path), **options)
        tensors = _untied(net, _read_weights(net, path))
        return path, load_whole_net_state(net, tensors, **options)
    except ValueError as error:
        if isinstance(error, UnreadableFile):
            raise DamagedCheckpoint(error.path, error.reason) from error
        raise ValueError(f"{path} does not fit the net: {error}") from error


def start_from(cfg: DictConfig, net: nn.Module, strategy: Strategy) -> None:
    """Fills the net, as this rank holds it, with the weights that init_from names.

    Raises: ConfigError with code 65 (damaged, or of another shape) or 66 (not found).
    """
    try:
        path, left = load_weights(
            net,
            cfg.init_from,
            monitor=cfg.checkpoint.monitor,
            mode=cfg.checkpoint.mode,
            strict=cfg.init_strict,
            aliases=strategy.aliases,
            stages=strategy.stages,
        )
    except FileNotFoundError as error:
        raise ConfigError.of(
            "init_from", cfg.init_from, str(error), code=INPUT_NOT_FOUND
        ) from error
    except (DamagedCheckpoint, NoGoodCheckpoint, UnsafeCheckpoint, ValueError) as error:
        wrong = str(error).removeprefix(f"{Path(cfg.init_from).expanduser()}: ")
        fits_partly = "does not fit" in wrong and cfg.init_strict
        attempt = "init_strict=false to take what fits" if fits_partly else ""
        more = {"attempt": attempt, "code": BAD_DATA}
        raise ConfigError.of("init_from", cfg.init_from, wrong, **more) from error
    log.info("%-9s from the weights of %s", "start", path)
    fresh, unused = [*left.missing, *left.mismatched], [*left.unexpected, *left.mismatched]
    if fresh:
        log.warning("warning: init_strict=false: %s of the net start as initialised", _few(fresh))
    if unused:
        log.warning("warning: init_strict=false: %s of the weights are not used", _few(unused))


def find_weights(
    source: str | Path, monitor: str = "val/loss", mode: str = "min"
) -> Checkpoint | Path:
    """The verified checkpoint, or the file of another origin, that source means.

    Raises: FileNotFoundError, DamagedCheckpoint.
    """
    source = Path(source).expanduser()
    if (source / CHECKPOINTS_NAME).is_dir():
        return choose_checkpoint(source, "best", monitor, mode)
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


def read_state(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's file.   Raises: UnsafeCheckpoint, DamagedCheckpoint."""
    content = load_file(path / STATE_NAME if path.is_dir() else path, mmap=True)
    if not isinstance(content, dict):
        raise DamagedCheckpoint(path, "holds no state dict")
    return content


def net_tensors(net: nn.Module, content: dict[str, Any], path: Path) -> dict[str, Tensor]:
    """The net's tensors in the content of a file, averaged ones where the run averaged them.

    Lightning's WeightAveraging puts the averages where the weights are, StochasticWeightAveraging
    keeps them in its own state. A module that calls its net otherwise has its name in front.
    """
    state, callbacks = content.get("state_dict", content), content.get("callbacks")
    for name, callback in callbacks.items() if isinstance(callbacks, dict) else ():
        averaged = isinstance(callback, dict) and callback.get("average_model_state")
        if str(name).startswith("StochasticWeightAveraging") and averaged:
            state = averaged
    pairs = state.items() if isinstance(state, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in pairs):
        raise DamagedCheckpoint(path, "holds no state dict")
    wanted = list(net.state_dict())
    for prefix in ("", NET, *_prefixes(state, wanted[0] if wanted else "")):
        held = {
            name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)
        }
        if set(held) & set(wanted):
            return {name: t for name, t in held.items() if not name.startswith(BESIDE)}
    return state


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of all files that an index names, mapped from them.

    Raises: DamagedCheckpoint.
    """
    from safetensors import SafetensorError  # an extra: only these files need it
    from safetensors.torch import load_file as load_safetensors

    if path.name == INDEX:
        return {k: v for part in _indexed(path) for k, v in read_safetensors(part).items()}
    with open_regular(path) as file:
        n_bytes = int.from_bytes(file.read(8), "little")  # of its header, JSON
    if n_bytes > MAX_JSON_BYTES:
        raise DamagedCheckpoint(path, f"not a safetensors file (a header of {n_bytes} bytes)")
    try:
        return load_safetensors(path)
    except SafetensorError as error:
        raise DamagedCheckpoint(path, f"not a safetensors file ({error})") from error


def _indexed(index: Path) -> list[Path]:
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise DamagedCheckpoint(index, "not an index of safetensors files: it has no weight_map")
    parts = sorted(set(map(str, names.values())))
    for name in parts:
        if Path(name).name != name or not name.endswith(".safetensors"):  # nor an index again
            raise DamagedCheckpoint(index, f"names {name}, which is no safetensors file beside it")
        if not (index.parent / name).is_file():
            raise DamagedCheckpoint(index, f"names {name}, which is not there")
    return [index.parent / name for name in parts]


def _read_weights(net: nn.Module, path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors" and path.name != INDEX:
        return net_tensors(net, read_state(path), path)
    tensors, config = read_safetensors(path), path.parent / "config.json"
    if path.name not in (SAFETENSORS, INDEX) or not config.exists():
        return tensors
    if not hasattr(net, "from_gpt2"):
        raise ValueError(
            f"{config}: a folder in the layout of Hugging Face, and {type(net).__name__} has no "
            f"`from_gpt2` that reads it (see gptrain.models)"
        )
    content = read_json(config)
    if not isinstance(content, dict):
        raise DamagedCheckpoint(config, "not a mapping")
    return net.from_gpt2(content, tensors)


def _untied(net: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With an entry for each name, where a file keeps a tied weight once."""
    ties = {second: first for second, first in tied_names(net).items() if second not in tensors}
    return tensors | {second: tensors[first] for second, first in ties.items() if first in tensors}


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _prefixes(state: dict[str, Tensor], name: str) -> list[str]:
    return [key.removesuffix(name) for key in state if name and key.endswith(f".{name}")]
