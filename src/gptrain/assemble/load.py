"""Load a trained net, for a notebook: `gptrain.load("outputs/a")`; build nets; load weights."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import Tensor, nn

from gptrain.assemble.companion_files import GENERATION, read_ends
from gptrain.assemble.config_errors import as_config_errors
from gptrain.checkpoints.manifest import MANIFEST_NAME, DamagedCheckpointError, verify
from gptrain.checkpoints.signature import read_record
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.checkpoints.tensors import SavedTensors, load_file
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.locations import expand_home
from gptrain.core.schema import ModelConfig, RunConfig
from gptrain.core.small_files import UnreadableFileError, read_facts, read_values
from gptrain.data.tokenizers import FILE_NAME, Tokenizer, load_tokenizer
from gptrain.parallel import state as states

log = logging.getLogger(__name__)
_SAFETENSORS = "model.safetensors"
_INDEX = f"{_SAFETENSORS}.index.json"  # transformers writes it for weights in several files


def load(
    source: str | Path, which: str = "best", *, trust: bool = False, with_tokenizer: bool = False
) -> nn.Module | tuple[nn.Module, Tokenizer | None]:
    """Return the net of a run, a checkpoint or an export, on the CPU and in evaluation mode.

    The config of the folder must be signed with this user's key, or trusted. Weights are read
    without running code in them. Neither Hydra's global state nor torch's random number generator
    is changed.

    Args:
        source: Run folder, checkpoint folder in it, folder of `gptrain.export`, or file that
            Lightning saved.
        which: "best" or "last", the checkpoint of a run folder. The best is chosen by the run's
            `checkpoint.monitor`. If no checkpoint has this metric, it is the newest one.
        trust: Whether to load a folder that another person made. Its config can run any code.
        with_tokenizer: Whether to return the tokenizer, too.

    Returns:
        The net, or the pair (net, tokenizer) if `with_tokenizer` is true. The tokenizer is None if
        the folder has no tokenizer.json.

    Raises:
        FileNotFoundError: If there is no run and no file of weights.
        DataError: If a file is damaged, or would execute code. A DamagedCheckpointError is one.
        OSError: If a file cannot be read.
        ModuleNotFoundError: If an optional package that a file needs is missing.
        ConfigError: If the folder is not signed with this user's key, and `trust` is false.
        ValueError: If the weights belong to another net, or `which` is unknown.
        Exception: If the class of the net refuses the keys of the config, with its own error.
    """
    if which not in ("best", "last"):
        raise ValueError(f"which={which!r}: not known; allowed: best, last")
    source = expand_home(source)
    content, run_dir = _read_config(source, trust)
    # The config of an export has no group `checkpoint`.
    options = content.get("checkpoint", {"monitor": "val/loss", "mode": "min"})
    weights = find_weights(source, which, options["monitor"], options["mode"])
    with torch.random.fork_rng(devices=[]):
        net = build_net(ModelConfig.model_construct(**content["model"]))
    load_weights(net, weights)
    return (net.eval(), find_tokenizer(run_dir)) if with_tokenizer else net.eval()


def build_target(node: Mapping[str, Any], key: str) -> Any:
    """Build and return the object that a node with a `_target_` describes, as Hydra does.

    Nodes among its arguments are built, too. Lists and dicts are plain Python objects.

    Args:
        node: `_target_` and its keyword arguments.
        key: Dotted key of the node, for the ConfigError.

    Raises:
        ConfigError: If a file is missing: instead of a FileNotFoundError, with exit code 66.
        Exception: If the target cannot be imported or raises it.
    """
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, FileNotFoundError):
            raise ConfigError.of(key, None, str(cause), code=INPUT_NOT_FOUND) from cause
        raise cause from None


def build_net(model: ModelConfig) -> nn.Module:
    """Build the net of a model group with its initial weights, on torch's default device.

    The weights depend on the state of torch's random generator, which the caller seeds. The errors
    are those of `build_target`.
    """
    return build_target(model.node(), "model")


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in the folder of a run or an export, or None without a tokenizer.json.

    Its `stop_ids` are the end tokens in the generation_config.json of the folder, or [] if this
    file is missing or damaged.

    Raises:
        DataError: If a file of the tokenizer is damaged.
        OSError: If a file of the tokenizer cannot be read.
    """
    if not (folder / FILE_NAME).exists():
        return None
    tokenizer = load_tokenizer(folder)
    tokenizer.stop_ids = read_ends(read_facts(folder / GENERATION))
    return tokenizer


def _read_config(source: Path, trust: bool) -> tuple[dict[str, Any], Path]:
    """Return the config of the run around `source`, or of the net in a file, and its folder."""
    # A file of a checkpoint is at most four levels below its run folder.
    folders = (source, *source.absolute().parents[:4])
    files = [folder / ".hydra" / "config.yaml" for folder in folders]
    if config := next((file for file in files if file.is_file()), None):
        run_dir = config.parent.parent
        content, is_signed = read_record(config)
    else:
        run_dir, is_signed = source.parent, False
        content = load_file(source) if source.is_file() else {}
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or "_target_" not in model:
        raise FileNotFoundError(f"{source}: no run in this folder, and no model in this file")
    if not is_signed and not trust:
        message = f"{source}: not signed by you on this machine; its config can run any code"
        raise ConfigError.of("", None, message, hint="trust=true")
    return content, run_dir


# Weights


def find_weights(
    source: str | Path, which: str = "best", monitor: str = "val/loss", mode: str = "min"
) -> Path:
    """Return the folder of the verified checkpoint, or the file of weights, that `source` names.

    Nothing is renamed or removed, because the run may still be running.

    Args:
        source: Run folder, checkpoint folder or a file in it, folder with model.safetensors or its
            index, or any other file, which is returned as it is.
        which: For a run folder, "best" or "last". Damaged checkpoints are passed over. "best" is
            the newest checkpoint if none has the metric.
        monitor: Logged name of the metric for "best".
        mode: "min" if its lowest value is the best, "max" if the highest is.

    Raises:
        FileNotFoundError: If there are no weights.
        DamagedCheckpointError: If the checkpoint is damaged, or every checkpoint of the run.
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
    for file in (source, source / _SAFETENSORS, source / _INDEX):
        if file.is_file():
            return file
    what = f"no checkpoint and no {_SAFETENSORS} in this folder"
    raise FileNotFoundError(f"{source}: {what if source.exists() else 'no such file or folder'}")


def load_weights(net: nn.Module, path: Path, **options: Any) -> list[str]:
    """Load weights from files into a net, which may be partitioned, in place.

    It uses no collective: each rank reads its own part of the files.

    Args:
        net: Net, or the part of it that this rank holds.
        path: Result of `find_weights`: a checkpoint's folder, a file that Lightning saved, the
            weights of transformers in one file or the index of several, or a safetensors file with
            the net's own names.
        options: `strict`, `resizes` and `full_net` of `load_net_state`. By default names and shapes
            must be the same, and this rank holds all tensors of the net.

    Returns:
        Phrases about what was loaded in part or not at all. Empty if everything was loaded.

    Raises:
        UnreadableFileError: If a file is damaged, or would execute code.
        OSError: If a file cannot be read.
        ValueError: If the weights do not fit. The message names the first differing tensors.
    """
    state = SavedTensors(path if path.is_dir() else _read_weights(net, path))
    return states.load_net_state(net, state, **options)


def find_trained(cfg: RunConfig) -> Path:
    """Return the weights that an evaluation or an export reads: a verified checkpoint or a file.

    `ckpt_path` names them: a path, or `best` or `last` of the run in the folder `from_run`. Without
    `from_run` it is the run in `run_dir`, and without `ckpt_path` the best checkpoint.

    Raises:
        ConfigError: If the weights are damaged (exit code 65) or do not exist (66).
        OSError: If a folder cannot be read, or its network file system does not answer.
    """
    requested = cfg.ckpt_path
    which = "last" if requested == "last" else "best"
    source = cfg.from_run or cfg.run_dir if requested in (None, "best", "last") else requested
    key = "from_run" if requested is None else "ckpt_path"
    with as_config_errors(cfg, key, BAD_DATA):
        return find_weights(source, which, cfg.checkpoint.monitor, cfg.checkpoint.mode)


def start_from(cfg: RunConfig, source: str, net: nn.Module, full_net: nn.Module) -> None:
    """Load weights into the net of a new run, in place, and log what was left out.

    With a longer `model.max_seq_len` the learned positions are kept and the others stay as
    initialized. With `init_strict=false` only tensors with the name and shape of the net's are
    loaded.

    Args:
        source: Value of `init_from`: anything that `find_weights` takes. Of a run folder, it is the
            best checkpoint by `checkpoint.monitor` of `cfg`.
        net: Net as the strategy has partitioned it.
        full_net: Net before it was partitioned.

    Raises:
        ConfigError: If the weights are missing (exit code 66), damaged or do not fit (65).
        OSError: If a file cannot be read.
    """
    misfit = "init_strict=false to load the weights that match" if cfg.init_strict else ""
    with as_config_errors(cfg, "init_from", BAD_DATA, misfit):
        path = find_weights(source, "best", cfg.checkpoint.monitor, cfg.checkpoint.mode)
        notes = load_weights(net, path, strict=cfg.init_strict, resizes=True, full_net=full_net)
    log.info(labels.line("start", f"from the weights of {path}"))
    for note in notes:
        log.warning("warning: init_from: %s", note)


def _read_weights(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, or of the files of an index, by the net's names.

    The method `from_hugging_face` of the net converts weights of transformers. Raises the errors of
    `load_weights`.
    """
    if path.suffix != ".safetensors" and path.name != _INDEX:
        return _net_tensors(net, path)
    tensors = SavedTensors(path.parent if path.name == _INDEX else path).full()
    config = path.parent / "config.json"
    if path.name not in (_SAFETENSORS, _INDEX) or not config.exists():
        return tensors
    if (read := getattr(net, "from_hugging_face", None)) is None:
        reason = f"{type(net).__name__} has no `from_hugging_face` (see gptrain.models)"
        raise ValueError(f"{config}: {reason}")
    content = read_values(config)
    if not isinstance(content, dict):
        raise UnreadableFileError(config, "not a mapping")
    return read(content, tensors)


def _net_tensors(net: nn.Module, path: Path) -> dict[str, Tensor]:
    """Read the net's tensors from a file of Lightning or of torch.save.

    A common prefix of the names, such as the name of the net in a LightningModule, is removed.
    Tensors outside the net are left out.
    """
    state = load_file(path)
    if isinstance(state, dict):  # nanoGPT's files have the weights under `model`
        state = state.get("state_dict", state.get("model", state))
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise DamagedCheckpointError(path, "holds no state dict")
    # torch.compile has wrapped the net or its blocks.
    state = {str(name).replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    names = net.state_dict().keys()
    first = next(iter(names), "")
    prefixes = {name.removesuffix(first) for name in state if f".{name}".endswith(f".{first}")}
    # The file may have a tied tensor under one of its names only.
    found = {prefix: sum(prefix + name in state for name in names) for prefix in prefixes}
    fitting = {prefix for prefix, n in found.items() if n == max(found.values())}
    prefix = states.NET if states.NET in fitting else min(fitting, key=len, default="")
    if len(fitting) > 1 and prefix not in ("", states.NET):
        raise ValueError(f"holds several nets: {', '.join(sorted(fitting))}; keep one of them")
    return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
