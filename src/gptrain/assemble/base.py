"""Base weights of a run that trains only some of its weights.

A checkpoint of such a run holds the weights that are trained. The frozen weights stay in the files
that `init_from` named. The checkpoint's manifest has their path and their hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from gptrain.assemble.weights import (
    find_base,
    hash_weights,
    load_weights,
    loaded_names,
    named_source,
    start_from,
)
from gptrain.checkpoints.manifest import BASE, Checkpoint, read_manifest
from gptrain.core.schema import RunConfig
from gptrain.lit.strategies.saving import BaseWeights, SavingStrategy
from gptrain.parallel.mesh import from_rank_0


def check_base(entries: Mapping[str, Any]) -> None:
    """Check that the frozen weights to which a checkpoint refers still exist and are unchanged.

    A run that trains only some of its weights does not save the frozen ones, its base weights: they
    stay in the file that `init_from` named. Reads every byte of this file. Does nothing if the
    checkpoint holds all weights itself.

    Args:
        entries: Entries of the checkpoint's manifest that describe the run (its key `config`).

    Raises:
        ConfigError: If the weights are missing (exit code 66) or have changed (65).
    """
    if base := entries.get(BASE):
        with named_source("init_from", base["path"]):
            find_base(base)


def load_start(
    cfg: RunConfig, checkpoint: Path | None, net: nn.Module, strategy: SavingStrategy
) -> None:
    """Load the weights that do not come from a checkpoint of this run.

    At a start these are the weights of `init_from`. On a resume they are the base weights of the
    checkpoint: the frozen weights of a run that trains only some of its weights, which are in no
    checkpoint. The Trainer loads the other weights of the checkpoint later. Sets `strategy.base` if
    frozen weights were loaded, so that checkpoints refer to them. All ranks must call this
    function.

    Args:
        cfg: Configuration of the run.
        checkpoint: Checkpoint to resume from or to evaluate, whose base was checked. None for a
            start at step 0.
        net: Net, or the part of it that this rank holds.
        strategy: Strategy of the run.

    Raises:
        ConfigError: If the weights of `init_from` cannot be loaded.
        FileNotFoundError, DamagedCheckpointError, AllDamagedError, ValueError: If the base weights
            of the checkpoint can no longer be loaded.
        ModuleNotFoundError: If a safetensors file needs the missing package `safetensors`.
    """
    stages = strategy.parallel.stages
    if checkpoint is None and cfg.init_from is None:
        return
    if checkpoint is None:
        weights, left_out = start_from(cfg, str(cfg.init_from), net, stages)
        path = weights.path if isinstance(weights, Checkpoint) else weights
        base = {"path": str(path.absolute())}
    else:
        base = read_manifest(checkpoint)["config"].get(BASE)
        if base is None:
            return
        weights = find_base(base, verifies=False)
        _, left_out = load_weights(net, weights, strict=False, stages=stages)
    frozen = {
        name for name, p in net.named_parameters(remove_duplicate=False) if not p.requires_grad
    }
    frozen |= {stages.aliases[name] for name in frozen & stages.aliases.keys()}
    names = frozen & loaded_names(net, left_out, stages)
    if names and "sha256" not in base:
        base["sha256"] = from_rank_0(hash_weights(weights))
    if names:
        strategy.base = BaseWeights(base, names)
