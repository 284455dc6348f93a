"""A trained net in one line, for a notebook: `gptrain.load("outputs/a")`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from gptrain.assemble.parts import build_net
from gptrain.assemble.resume import choose_checkpoint
from gptrain.assemble.weights import load_weights, read_state
from gptrain.config import register_resolvers, trust
from gptrain.problems import BAD_DATA, ConfigError
from gptrain.resilience.manifest import MANIFEST_NAME, Checkpoint
from gptrain.resilience.store import CheckpointStore
from gptrain.small_files import UnreadableFile, read_yaml

CHOICES = ("best", "last")
NOT_READ = ("callbacks", "logger", "profiler", "hydra")
_PLACES = 4  # folders above a checkpoint's file in which its run may lie


def load(source: str | Path, which: str = "best", allowed_targets: Sequence[str] = ()) -> nn.Module:
    """The net of a run or of a checkpoint, on the CPU in evaluation mode.

    Of a folder only tensors and plain values are read, and the names of the net's classes, which
    must be nn.Modules of this project's own code, of torch or Lightning, or of a package allowed
    here. Neither Hydra's global state nor the random numbers are touched.

    Args:
        source: a run folder, a checkpoint's folder, or a file that Lightning saved.
        which: of a run: "best" by its checkpoint.monitor (the newest where none was measured), or
            "last".
        allowed_targets: packages from which this run may take classes.

    Raises: FileNotFoundError, DamagedCheckpoint, UnsafeCheckpoint; ConfigError for a class that
        may not be imported, or a config that cannot be read; ValueError for weights of another net.
    """
    if which not in CHOICES:
        raise ValueError(f"which={which!r}: not known; allowed: {', '.join(CHOICES)}")
    source = Path(source).expanduser()
    config = _find_config(source)
    run_dir = source.parent if config is None else config.parent.parent
    found: str | Path | Checkpoint = source
    if config is None:
        content = {"model": read_state(source).get("model")} if source.is_file() else {}
        cfg = trust.plain(content)
    else:
        cfg = _read_config(config)
    if not isinstance(cfg.get("model"), dict) or "_target_" not in cfg["model"]:
        raise FileNotFoundError(f"{source}: no run in this folder, and no model in this file")
    if problems := trust.check_targets(cfg["model"], "model", allowed_targets, run_dir):
        raise ConfigError(problems)
    if config is not None and source == run_dir:
        found = choose_checkpoint(source, which, *_monitor(cfg))
    elif (source / MANIFEST_NAME).exists():
        found = CheckpointStore(source.parent).verify(source)
    try:
        with torch.random.fork_rng(devices=[]):
            net = build_net(OmegaConf.create({"model": cfg["model"]}))
    except (TypeError, ValueError, RuntimeError) as error:  # of arguments that do not fit
        wrong = f"cannot be made: {str(error).splitlines()[0]}"
        raise ConfigError.of("model", cfg["model"]["_target_"], wrong, code=BAD_DATA) from error
    load_weights(net, found)
    return net.eval()


def _find_config(source: Path) -> Path | None:
    """The composed config of the run that source is, or lies in."""
    folders = [source, *source.absolute().parents[:_PLACES]]
    if not source.exists():
        raise FileNotFoundError(f"{source}: no such file or folder")
    for folder in folders:
        if (folder / ".hydra" / "config.yaml").is_file():
            return folder / ".hydra" / "config.yaml"
    return None


def _read_config(path: Path) -> dict[str, Any]:
    """Plain values of a composed config; groups that a net cannot depend on are left out."""
    try:
        content = read_yaml(path)
        if not isinstance(content, dict):
            raise UnreadableFile(path, "not a mapping")
    except UnreadableFile as error:
        raise ConfigError.of("", None, str(error), code=BAD_DATA) from error
    register_resolvers()
    return trust.plain({key: value for key, value in content.items() if key not in NOT_READ})


def _monitor(cfg: dict[str, Any]) -> tuple[str, str]:
    """What tells the best checkpoint of a run, and whether its lowest or its highest is best."""
    match cfg.get("checkpoint"):
        case {"monitor": str(monitor), "mode": "min" | "max" as mode}:
            return monitor, mode
        case {"monitor": str(monitor)}:
            return monitor, "min"
    return "val/loss", "min"
