"""A trained net in one line, for a notebook: `gptrain.load("outputs/a")`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import nn

from gptrain.assemble.parts import build_net
from gptrain.assemble.resume import choose_checkpoint
from gptrain.assemble.weights import load_weights
from gptrain.config import register_resolvers, trust
from gptrain.problems import BAD_DATA, ConfigError, Problem
from gptrain.small_files import UnreadableFile, read_yaml

CHOICES = ("best", "last")


def load(
    run_dir: str | Path, which: str = "best", allowed_targets: Sequence[str] = ()
) -> nn.Module:
    """The net of a run, on the CPU in evaluation mode, as one of its checkpoints left it.

    Of the folder only tensors and plain values are read, and the names of the net's classes, which
    must pass the check that training makes, and be nn.Modules. Neither Hydra's global state nor the
    random numbers are touched.

    Args:
        allowed_targets: packages that the net's classes may come from, besides this checkout and
            torch.
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
    try:
        cfg = OmegaConf.create(trust.plain(read_yaml(config)))
    except UnreadableFile as error:
        raise ConfigError([Problem("run_dir", str(run_dir), str(error), code=BAD_DATA)]) from None
    if problems := trust.check_targets(OmegaConf.to_container(cfg.model), "model", allowed_targets):
        raise ConfigError(problems)
    checkpoint = choose_checkpoint(run_dir, which, cfg.checkpoint.monitor)
    with torch.random.fork_rng(devices=[]):
        net = build_net(cfg)
    load_weights(net, checkpoint)
    return net.eval()
