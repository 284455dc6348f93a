"""A trained net in one line, for a notebook: `gptrain.load("outputs/a")`."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gptrain.assemble.parts import build_net
from gptrain.assemble.resume import choose_checkpoint
from gptrain.assemble.weights import load_weights
from gptrain.config.checks.objects import check_objects, resolve
from gptrain.config.checks.run import Run
from gptrain.config.checks.targets import check_target_names
from gptrain.config.schema import register_resolvers
from gptrain.problems import ConfigError

CHOICES = ("best", "last")


def load(run_dir: str | Path, which: str = "best") -> nn.Module:
    """The net of a run, on the CPU in evaluation mode, as one of its checkpoints left it.

    Of the folder only tensors and plain values are read, and the names of the net's classes, which
    must pass the check that training makes, and be nn.Modules. Neither Hydra's global state nor the
    random numbers are touched.

    Args:
        which: "best" by the run's checkpoint.monitor (the newest where none was measured), or
            "last".

    Raises: FileNotFoundError, DamagedCheckpoint, UnsafeCheckpoint; ConfigError for a class that
        may not be imported.
    """
    if which not in CHOICES:
        raise ValueError(f"which={which!r}: not known; allowed: {', '.join(CHOICES)}")
    config = Path(run_dir).expanduser() / ".hydra" / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"{run_dir}: no run in this folder, {config} is missing")
    register_resolvers()
    cfg = OmegaConf.load(config)
    check_classes(cfg)
    checkpoint = choose_checkpoint(run_dir, which, cfg.checkpoint.monitor)
    with torch.random.fork_rng(devices=[]):
        net = build_net(cfg)
    load_weights(net, checkpoint)
    return net.eval()


def check_classes(cfg: DictConfig) -> None:
    """Imports what the model group names, if the run may use it, and makes sure of its kind.

    Stricter than training by one rule, since the folder may be someone else's, and says itself
    which packages it may use: arguments, too, are made by nn.Modules only.

    Raises: ConfigError.
    """
    run = Run.of(OmegaConf.masked_copy(cfg, ["model", "allowed_targets"]))
    check_target_names(run)
    if not run.problems:
        check_objects(run)
    for path, node in run.targets():
        if not run.problems:
            found, _ = resolve(node["_target_"])
            if not (inspect.isclass(found) and issubclass(found, nn.Module)):
                run.error(f"{path}._target_", "no nn.Module", value=node["_target_"])
    if run.problems:
        raise ConfigError(run.problems)
