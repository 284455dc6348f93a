"""Load a trained net, for a notebook: `gptrain.load("outputs/a")`; and build `_target_` nodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from gptrain.assemble.companion_files import GENERATION, read_ends
from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.weights import find_weights, load_weights
from gptrain.checkpoints.signature import read_signed_record
from gptrain.checkpoints.tensors import load_file
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError
from gptrain.core.locations import expand_home
from gptrain.core.schema import ModelConfig, RunConfig
from gptrain.core.small_files import read_facts, read_yaml
from gptrain.data.tokenizers import Tokenizer, load_tokenizer
from gptrain.runtime.devices import accelerator_of, set_threads

CHOICES = ("best", "last")
_MAX_LEVELS = 4  # a run folder is at most so many levels above a checkpoint's file


def load(
    source: str | Path,
    which: str = "best",
    *,
    trust: bool = False,
    with_tokenizer: bool = False,
) -> nn.Module | tuple[nn.Module, Tokenizer | None]:
    """Return the net of a run, a checkpoint or an export, on the CPU and in evaluation mode.

    The config of the folder must be signed with this user's key, or trusted. Weights are read
    without running code in them. Neither Hydra's global state nor torch's random number generator
    is changed.

    Args:
        source: Run folder, checkpoint folder, folder of gptrain.export, or file that Lightning
            saved.
        which: For a run, "best" by its checkpoint.monitor (the newest checkpoint if no metric was
            measured), or "last".
        trust: Whether to load a folder that another person made. Its config can run any code.
        with_tokenizer: Whether to return the tokenizer, too.

    Returns:
        The net, or the pair (net, tokenizer). The tokenizer is None if the run's data had none.

    Raises:
        FileNotFoundError: If there is no run and no file of weights.
        DamagedCheckpointError, DataError: If a file is damaged, or would execute code.
        OSError: If a file cannot be read.
        ModuleNotFoundError: If an optional package that a file needs is missing.
        ConfigError: If the folder is not trusted, or the net cannot be built with its keys.
        ValueError: If the weights belong to another net, or `which` is unknown.
    """
    if which not in CHOICES:
        raise ValueError(f"which={which!r}: not known; allowed: {', '.join(CHOICES)}")
    source = expand_home(source)
    content, run_dir = _read_config(source, trust)
    match content.get("checkpoint"):  # an export has none, and the file may be damaged
        case {"monitor": str(monitor), "mode": ("min" | "max") as mode}:
            weights = find_weights(source, which, monitor, mode)
        case _:
            weights = find_weights(source, which)
    try:
        with torch.random.fork_rng(devices=[]):
            section = ModelConfig.model_construct(**content["model"])
            net = build_net(section)
    except (TypeError, ValueError, RuntimeError) as error:  # the arguments do not fit the class
        message = f"cannot be made: {str(error).splitlines()[0]}"
        raise ConfigError.of(
            "model", content["model"]["_target_"], message, code=BAD_DATA
        ) from error
    load_weights(net, weights)
    return (net.eval(), find_tokenizer(run_dir)) if with_tokenizer else net.eval()


def load_for_command(cfg: RunConfig) -> tuple[nn.Module, Tokenizer | None, str]:
    """Load net and tokenizer of `from_run`, for a command that generates or scores text.

    `ckpt_path` is "best", the default, or "last". The net is on the CPU and in evaluation mode.
    torch gets as many threads as this process may use cores.

    Returns:
        The net, its tokenizer (None if the run's data had none), and the type of the device of
        `trainer.accelerator`, such as "cuda", to which the caller moves the net.

    Raises:
        ConfigError: If this machine does not have the device, or if `from_run` is not trusted,
            damaged (exit code 65) or missing (66), or does not fit its net (65).
        OSError: If a file cannot be read.
        ModuleNotFoundError: If an optional package that a file needs is missing.
    """
    device = accelerator_of(cfg.trainer.accelerator)
    if device is None:
        raise ConfigError.of("trainer.accelerator", cfg.trainer.accelerator, "not on this machine")
    set_threads(1)
    source = cast(str, cfg.from_run)
    with as_config_errors(cfg, "from_run", BAD_DATA):
        which = cfg.ckpt_path or "best"
        net, tokenizer = cast(Any, load(source, which, trust=cfg.trust, with_tokenizer=True))
    return net, tokenizer, device


def build_target(node: Mapping[str, Any], key: str) -> Any:
    """Build and return the object that a node with a `_target_` describes.

    Lists and dicts among the arguments are plain Python objects. Raises what the class raises, but
    for a FileNotFoundError a ConfigError of `key` with exit code 66.
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

    The weights depend on the state of torch's random generator, which the caller seeds. Raises what
    the class raises, but for a FileNotFoundError a ConfigError with exit code 66.
    """
    return build_target(model.node(), "model")


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer in the folder of a run or an export, or None if there is none.

    Its `stop_ids` are the end tokens in the generation_config.json of the folder, if any. Raises a
    DataError if a file is damaged, or an OSError if it cannot be read.
    """
    try:
        tokenizer = load_tokenizer(folder)
    except FileNotFoundError:
        return None
    file = folder / GENERATION
    tokenizer.stop_ids = read_ends({} if file.is_symlink() else read_facts(file))
    return tokenizer


def _read_config(source: Path, trust: bool) -> tuple[dict[str, Any], Path]:
    """Return the config of the run around `source`, or of the net in a file, and its folder."""
    folders = (source, *source.absolute().parents[:_MAX_LEVELS])
    files = [folder / ".hydra" / "config.yaml" for folder in folders]
    if config := next((file for file in files if file.is_file()), None):
        run_dir = config.parent.parent
        record = read_signed_record(run_dir)
        content = yaml.safe_load(record[config.name]) if record else read_yaml(config)
    else:
        record, run_dir = None, source.parent
        content = load_file(source) if source.is_file() else {}
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or "_target_" not in model:
        raise FileNotFoundError(f"{source}: no run in this folder, and no model in this file")
    if record is None and not trust:
        message = f"{source}: not made by you on this machine; its config can run any code"
        raise ConfigError.of("", None, message, hint="trust=true")
    return content, run_dir
