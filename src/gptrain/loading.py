"""A trained net in one line, for a notebook: `gptrain.load("outputs/a")`."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import nn

from gptrain.config.schema import register_resolvers
from gptrain.recipe import build_net
from gptrain.resume import choose_checkpoint
from gptrain.weights import load_weights

CHOICES = ("best", "last")


def load(run_dir: str | Path, which: str = "best") -> nn.Module:
    """The net of a run, on the CPU in evaluation mode, as one of its checkpoints left it.

    Its class is imported from where the run's config says, which must be among the packages that
    a run may use; of the checkpoint, full or sharded, only tensors and plain values are read.
    Neither Hydra nor the global random numbers are touched.

    Args:
        which: "best" by the run's checkpoint.monitor (the newest where none was measured), or
            "last".

    Raises: FileNotFoundError, DamagedCheckpoint, UnsafeCheckpoint; ConfigError for a class that
        may not be imported.
    """
    if which not in CHOICES:
        raise ValueError(f"which={which!r}: not known; allowed: {', '.join(CHOICES)}")
    config = Path(run_dir) / ".hydra" / "config.yaml"
    if not config.is_file():
        raise FileNotFoundError(f"{run_dir}: no run in this folder, {config} is missing")
    register_resolvers()
    cfg = OmegaConf.load(config)
    checkpoint = choose_checkpoint(run_dir, which, cfg.checkpoint.monitor)
    with torch.random.fork_rng(devices=[]):
        net = build_net(cfg)
    load_weights(net, checkpoint)
    return net.eval()
