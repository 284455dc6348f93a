"""Load the weights of a run, a checkpoint, a folder of transformers or a file into a net."""

import logging
from pathlib import Path

from torch import Tensor, nn

from gptrain.assemble.config_errors import as_config_errors
from gptrain.checkpoints.manifest import MANIFEST_NAME, DamagedCheckpointError, verify
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import SavedTensors, load_file
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, DataError
from gptrain.core.locations import expand_home
from gptrain.core.schema import RunConfig
from gptrain.core.small_files import UnreadableFileError, read_json
from gptrain.parallel import state as states
from gptrain.parallel.state import NO_STAGES, Stages

log = logging.getLogger(__name__)
SAFETENSORS = "model.safetensors"
INDEX = f"{SAFETENSORS}.index.json"  # transformers writes it for weights in several files


def find_weights(
    source: str | Path, which: str = "best", monitor: str = "val/loss", mode: str = "min"
) -> Path:
    """Return the folder of the verified checkpoint, or the file of weights, that `source` names.

    Nothing is renamed or removed, because the run may still be running.

    Args:
        source: Run folder, checkpoint folder, folder of safetensors files, or a file.
        which: For a run folder, "best" (the newest if no metric was measured) or "last".
        monitor: Logged name of the metric.
        mode: "min" if its lowest value is the best, "max" if the highest is.

    Raises:
        FileNotFoundError: If there are no weights.
        DamagedCheckpointError: If the checkpoint is damaged.
        OSError: If a folder cannot be read, or its network file system does not answer.
    """
    source = expand_home(source)
    if (source / CHECKPOINTS_NAME).is_dir():
        store = CheckpointStore(source / CHECKPOINTS_NAME)
        best = store.best(monitor, mode) if which == "best" else None
        if path := best or store.newest_intact():
            return path
    folder = source.parent if source.is_file() else source
    if (folder / MANIFEST_NAME).exists():
        verify(folder)
        return folder
    for file in (source, source / SAFETENSORS, source / INDEX):
        if file.is_file():
            return file
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or folder")
    raise FileNotFoundError(f"{source}: no checkpoint and no {SAFETENSORS} in this folder")


def load_weights(
    net: nn.Module,
    path: Path,
    *,
    strict: bool = True,
    resizes: bool = False,
    stages: Stages = NO_STAGES,
) -> list[str]:
    """Load weights from files into a net, which may be partitioned, in place.

    All ranks must call this function if the net is partitioned over a pipeline.

    Args:
        net: Net, or the part of it that this rank holds.
        path: Result of `find_weights`: a checkpoint's folder, a file that Lightning saved, the
            weights of transformers in one file or the index of several, or a safetensors file with
            the net's own names.
        strict: Raise an error if names or shapes differ. False loads the tensors that match.
        resizes: Also load tables of learned positions of another length, as far as they overlap;
            into a shorter table only if not strict.
        stages: Stages of the pipeline. The default is for a net without one.

    Returns:
        Phrases about what was loaded in part or not at all.

    Raises:
        UnreadableFileError: If a file is damaged, or would execute code.
        OSError: If a file cannot be read.
        ValueError: If the weights do not fit. The message names the first differing tensors.
    """
    try:
        state = SavedTensors(path if path.is_dir() else read_weights(net, path))
        return states.load_net_state(net, state, strict=strict, resizes=resizes, stages=stages)
    except DataError:
        raise
    except ValueError as error:
        raise ValueError(f"{path} does not fit the net: {error}") from error


def start_from(cfg: RunConfig, source: str, net: nn.Module, stages: Stages) -> None:
    """Load the weights that `init_from` names into the net, and log what was left out. Collective.

    With a longer `model.max_seq_len` the learned positions are kept and the others stay as
    initialized. Raises a ConfigError if the weights are missing, damaged or do not fit.
    """
    misfit = "init_strict=false to load the weights that match" if cfg.init_strict else ""
    with as_config_errors(cfg, "init_from", BAD_DATA, misfit):
        path = find_weights(source, "best", cfg.checkpoint.monitor, cfg.checkpoint.mode)
        notes = load_weights(net, path, strict=cfg.init_strict, resizes=True, stages=stages)
    log.info(labels.line("start", f"from the weights of {path}"))
    for note in notes:
        log.warning("warning: init_from: %s", note)


def read_weights(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, or of the files of an index, by the net's names.

    The method `from_hugging_face` of the net converts weights of transformers. Raises the errors of
    `load_weights`.
    """
    if path.suffix != ".safetensors" and path.name != INDEX:
        return net_tensors(net, path)
    tensors = SavedTensors(path.parent if path.name == INDEX else path).full()
    config = path.parent / "config.json"
    if path.name not in (SAFETENSORS, INDEX) or not config.exists():
        return tensors
    if (read := getattr(net, "from_hugging_face", None)) is None:
        raise ValueError(
            f"{config}: a folder in the layout of Hugging Face, and {type(net).__name__} has no "
            f"`from_hugging_face` that reads it (see gptrain.models)"
        )
    content = read_json(config)
    if not isinstance(content, dict):
        raise UnreadableFileError(config, "not a mapping")
    return read(content, tensors)


def net_tensors(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the net's tensors from a file of Lightning or of torch.save.

    A common prefix of the names, such as the name of the net in a LightningModule, is removed.
    Tensors outside the net are left out.
    """
    content = load_file(path)
    state = content
    if isinstance(content, dict):  # nanoGPT's files have the weights under `model`
        state = content.get("state_dict", content.get("model", content))
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise DamagedCheckpointError(path, "holds no state dict")
    # torch.compile has wrapped the net or its blocks.
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    first = next(iter(net.state_dict()), "")
    prefixes = [name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")]
    fitting = {p for p in prefixes if all(p + name in state for name in net.state_dict())}
    prefix = states.NET if states.NET in fitting else min(prefixes, key=len, default="")
    if len(fitting) > 1 and prefix not in ("", states.NET):
        raise ValueError(f"holds several nets: {', '.join(sorted(fitting))}; keep one of them")
    tensors = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    return {name: t for name, t in tensors.items() if not name.startswith(states.EXTRA_PREFIX)}
