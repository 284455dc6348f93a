"""Load the weights of a run, a checkpoint, a folder of transformers or a file into a net."""

import hashlib
import logging
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from gptrain.checkpoints.manifest import (
    BASE,
    MANIFEST_NAME,
    STATE_NAME,
    AllDamagedError,
    Checkpoint,
    DamagedCheckpointError,
)
from gptrain.checkpoints.safe_load import SafeFileSystemReader, load_file
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels, shell
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.locations import expand_home
from gptrain.core.schema import CheckpointConfig, RunConfig
from gptrain.core.small_files import UnreadableFileError, open_regular, read_json
from gptrain.parallel.requirements import tied_names
from gptrain.parallel.state import EXTRA_PREFIX, NO_STAGES, Stages, load_net_state
from gptrain.parallel.unmatched import Unmatched

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestBy:
    """The logged metric by which the best checkpoint of a run is chosen.

    The defaults are for a run whose config is not known.

    Attributes:
        monitor: Logged name of the metric.
        mode: Whether the lowest or the highest value is the best.
    """

    monitor: str = "val/loss"
    mode: Literal["min", "max"] = "min"


VAL_LOSS = BestBy()
SAFETENSORS = "model.safetensors"
_READ_BYTES = 1 << 20
INDEX = f"{SAFETENSORS}.index.json"  # transformers writes it for weights in several files


def find_weights(
    source: str | Path, which: str = "best", by: BestBy | CheckpointConfig = VAL_LOSS
) -> Checkpoint | Path:
    """Return the verified checkpoint, or the file of weights, that `source` names.

    Nothing is renamed or removed, not even a damaged checkpoint, because its run may still be
    running.

    Args:
        source: Run folder, checkpoint folder, folder of safetensors files, or a file.
        which: For a run folder, "best" for the checkpoint with the best metric (the newest if no
            metric was measured), or "last" for the newest complete checkpoint.
        by: Metric of the best checkpoint: a `checkpoint` group or a BestBy.

    Raises:
        FileNotFoundError: If there are no weights.
        DamagedCheckpointError: If the checkpoint is damaged.
        AllDamagedError: If all checkpoints of the run are damaged.
        OSError: If a folder cannot be read, or the network file system does not answer.
    """
    source = expand_home(source)
    if (source / CHECKPOINTS_NAME).is_dir():
        store = CheckpointStore(source / CHECKPOINTS_NAME)
        best = store.best(by.monitor, by.mode) if which == "best" else None
        if checkpoint := best or store.newest_intact():
            return checkpoint
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
    """Turn errors about missing or unusable weights into a ConfigError that names the key.

    Args:
        key: Dotted key that names the weights.
        value: Value of the key.
        misfit: Hint for weights that belong to another net.

    Raises:
        ConfigError: If the block raises a FileNotFoundError (exit code 66), or a ValueError, a
            DamagedCheckpointError or an AllDamagedError (65). Other errors pass unchanged.
    """
    try:
        yield
    except (FileNotFoundError, DamagedCheckpointError, AllDamagedError, ValueError) as error:
        code = INPUT_NOT_FOUND if isinstance(error, FileNotFoundError) else BAD_DATA
        hint = misfit if isinstance(error, ValueError) else ""
        message = str(error).removeprefix(f"{expand_home(value)}: ")
        raise ConfigError.of(key, value, message, hint=hint, code=code) from error


def load_weights(
    net: nn.Module,
    source: str | Path | Checkpoint,
    *,
    strict: bool = True,
    resizes: bool = False,
    stages: Stages = NO_STAGES,
) -> tuple[Path, Unmatched]:
    """Load weights into a net, which may be partitioned.

    All ranks must call this function if the weights are a sharded checkpoint or the net is
    partitioned over a pipeline.

    Args:
        net: Net, or the part of it that this rank holds.
        source: Run folder (its best checkpoint by val/loss), checkpoint folder or file, file that
            Lightning saved, folder of transformers in one file or several, or safetensors file with
            the net's own names.
        strict: Whether every tensor of both sides must have its counterpart. Otherwise the tensors
            that fit by name and shape are loaded.
        resizes: Whether tables of learned positions of another length are accepted. All saved
            positions are copied into a longer table and, if not `strict`, the first ones into a
            shorter table.
        stages: Pipeline stages of the net.

    Returns:
        The path of the weights, and the names on both sides that were left out.

    Raises:
        FileNotFoundError: If there are no weights, or the frozen weights to which a checkpoint
            refers are missing.
        DamagedCheckpointError: If a file is damaged, or the frozen weights have changed.
        AllDamagedError: If all checkpoints of a run folder are damaged.
        UnsafeCheckpointError: If the file would execute code.
        OSError: If a file cannot be read.
        ModuleNotFoundError: If a safetensors file needs the missing package `safetensors`.
        ValueError: If the weights do not fit. The message names the tensors of both sides.
    """
    weights = source if isinstance(source, Checkpoint) else find_weights(source)
    path = weights.path if isinstance(weights, Checkpoint) else weights
    is_sharded = isinstance(weights, Checkpoint) and weights.manifest["kind"] == "sharded"
    in_base: Set[str] = frozenset()
    base = weights.manifest["config"].get(BASE) if isinstance(weights, Checkpoint) else None
    if base is not None:
        _, left_out = load_weights(net, find_base(base), strict=False, stages=stages)
        in_base = loaded_names(net, left_out, stages)
    options = {"strict": strict, "resizes": resizes, "stages": stages, "optional": in_base}
    try:
        state = SafeFileSystemReader(path) if is_sharded else read_weights(net, path)
        return path, load_net_state(net, state, **options)
    except UnreadableFileError as error:
        raise DamagedCheckpointError(error.path, error.reason) from error
    except ValueError as error:
        raise ValueError(f"{path} does not fit the net: {error}") from error


def find_base(base: Mapping[str, str], *, verifies: bool = True) -> Checkpoint | Path:
    """Return the frozen weights that a checkpoint refers to instead of holding them.

    Args:
        base: Entry `base` of the checkpoint's manifest: `path` and `sha256` of the weights.
        verifies: Whether to compare the hash of the weights, which reads every byte.

    Raises:
        FileNotFoundError: If the weights do not exist.
        DamagedCheckpointError: If they are damaged or have another hash.
        AllDamagedError: If the path is a run folder whose checkpoints are all damaged.
        OSError, UnreadableFileError: If a file cannot be read.
    """
    path = base["path"]
    if not Path(path).exists():
        message = "no such file or folder, which has the frozen weights of the run"
        folder = shell.command("mkdir", "-p", str(Path(path).parent))
        link = shell.command("ln", "-s", "NEW_PATH", path)
        raise FileNotFoundError(f"{path}: {message}; if they were moved: {folder}; {link}")
    weights = find_weights(path)
    if verifies and hash_weights(weights) != base["sha256"]:
        message = "not the weights that the run has started from, they have another sha256"
        raise DamagedCheckpointError(base["path"], message)
    return weights


def hash_weights(weights: Checkpoint | Path) -> str:
    """Return the SHA-256 of a file of weights. Reads every byte of a file.

    For an index of safetensors files it is the hash of all files that the index names, one after
    another. For a checkpoint it is computed from the hashes in the manifest.

    Raises:
        OSError, UnreadableFileError: If a file cannot be read.
        DamagedCheckpointError: If the index is damaged, or a file that it names is missing.
    """
    if isinstance(weights, Checkpoint):
        files = sorted(weights.manifest["files"].items())
        return hashlib.sha256(repr([(name, f["sha256"]) for name, f in files]).encode()).hexdigest()
    digest = hashlib.sha256()
    for path in _indexed(weights) if weights.name == INDEX else [weights]:
        with open_regular(path) as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def loaded_names(net: nn.Module, left_out: Unmatched, stages: Stages) -> Set[str]:
    """Return the names of the net's tensors that `load_weights` has loaded in full.

    A tied tensor counts under all of its names.

    Args:
        net: Net, or the part of it that this rank holds.
        left_out: Names that `load_weights` returned as left out.
        stages: Pipeline stages of the net.
    """
    lacking = {*left_out.missing, *left_out.mismatched, *left_out.positions}
    first_names = {**tied_names(net), **stages.aliases}
    names = {name: first_names.get(name, name) for name in net.state_dict()}
    return {n for pair in names.items() if pair[1] not in lacking for n in pair}


def start_from(
    cfg: RunConfig, source: str, net: nn.Module, stages: Stages
) -> tuple[Checkpoint | Path, Unmatched]:
    """Load the weights that `init_from` names into the net, and log what was left out.

    With a longer `model.max_seq_len` the learned positions are kept and the others stay as
    initialized. All ranks must call it if the weights are a sharded checkpoint or the net is
    partitioned over a pipeline.

    Args:
        cfg: Configuration of the run.
        source: Value of init_from.
        net: Net, or the part of it that this rank holds.
        stages: Pipeline stages of the net.

    Returns:
        The weights, and the names on both sides that were left out.

    Raises:
        ConfigError: If the weights are damaged or do not fit (exit code 65), or do not exist (66).
        OSError: If a file cannot be read.
        ModuleNotFoundError: If a safetensors file needs the missing package `safetensors`.
    """
    misfit = "init_strict=false to load the weights that match" if cfg.init_strict else ""
    with named_source("init_from", source, misfit):
        weights = find_weights(source, by=cfg.checkpoint)
        path, left_out = load_weights(
            net, weights, strict=cfg.init_strict, resizes=True, stages=stages
        )
    log.info(labels.line("start", f"from the weights of {path}"))
    for line in left_out.describe_positions():
        log.warning("warning: %s", line)
    if consequences := left_out.describe_consequences():
        log.warning("warning: init_strict=false: %s", consequences)
    return weights, left_out


def read_weights(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, or of a checkpoint that is not sharded, by the net's names.

    Args:
        net: Net whose names are used. Its method `from_hugging_face` converts weights of
            transformers.
        path: File of weights, index of safetensors files, or folder of a checkpoint.

    Raises:
        FileNotFoundError: If the file is missing.
        OSError: If a safetensors file or a config.json cannot be read.
        DamagedCheckpointError, UnreadableFileError: If the file is damaged.
        UnsafeCheckpointError: If the file would execute code.
        ModuleNotFoundError: If a safetensors file needs the missing package `safetensors`.
        ValueError: If the file belongs to another kind of net.
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
    """Read the net's tensors from a file of gptrain, of Lightning or of torch.save.

    A common prefix of the names, such as the name of the net in a LightningModule, is removed.
    Tensors outside the net are left out.

    Args:
        net: Net whose first parameter name shows the prefix.
        path: File, or folder of a checkpoint that is not sharded.

    Raises:
        FileNotFoundError: If the file is missing.
        DamagedCheckpointError: If the file is damaged or holds no state dict.
        UnsafeCheckpointError: If the file would execute code.
    """
    content = load_file(path / STATE_NAME if path.is_dir() else path, mmap=True)
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise DamagedCheckpointError(path, "holds no state dict")
    first = next(iter(net.state_dict()), "")
    prefixes = [name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")]
    prefix = min(prefixes, key=len, default="")
    tensors = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    return {name: t for name, t in tensors.items() if not name.startswith(EXTRA_PREFIX)}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, or all files that an index names, by memory mapping.

    Args:
        path: File. One of the name model.safetensors.index.json is an index.

    Raises:
        OSError: If the file is missing or cannot be read.
        DamagedCheckpointError: If a file is not a safetensors file, or an index is damaged.
        UnreadableFileError: If the path is not a regular file, or an index is no JSON.
        ModuleNotFoundError: If the package `safetensors` is missing.
    """
    from safetensors import SafetensorError  # an optional package that only these files need
    from safetensors.torch import load_file as load_safetensors

    if path.name == INDEX:
        return {k: v for part in _indexed(path) for k, v in read_safetensors(part).items()}
    open_regular(path).close()  # raises for a pipe, for which safetensors would wait
    try:
        return load_safetensors(path)
    except SafetensorError as error:
        raise DamagedCheckpointError(path, f"not a safetensors file ({error})") from error


def _indexed(index: Path) -> list[Path]:
    """Return the safetensors files that an index names, sorted by name.

    Args:
        index: Path of a model.safetensors.index.json.

    Raises:
        DamagedCheckpointError: If the file is no index, or if it names a file that does not exist,
            is not in the same folder or is not of the type .safetensors.
        UnreadableFileError: If the file is no JSON.
    """
    content: Any = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        message = "not an index of safetensors files: it has no weight_map"
        raise DamagedCheckpointError(index, message)
    parts = sorted(set(map(str, names.values())))
    for name in parts:
        is_in_folder = Path(name).name == name and (index.parent / name).is_file()
        if not is_in_folder or not name.endswith(".safetensors"):  # another index is refused, too
            message = f"names {name}, which is not a safetensors file in the same folder"
            raise DamagedCheckpointError(index, message)
    return [index.parent / name for name in parts]
