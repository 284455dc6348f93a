"""Whether the net can do what is asked of it, before a process or a file is made."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from omegaconf import DictConfig

from gptrain.assemble.parts import MODEL_KEYS, build_net, build_optimizer, fits
from gptrain.config.check import ANY_NET as WHOLE
from gptrain.parallel.fit import check_fit
from gptrain.plan import BatchPlan, dims_of
from gptrain.problems import ConfigError

SIMPLE_GPT, ADAMW = "gptrain.models.SimpleGPT", "torch.optim.AdamW"


def check_net(cfg: DictConfig, world_size: int) -> None:
    """Raises ConfigError where an option asks more of the net, or the optimizer, than it can do.

    The net is made on the meta device, without memory; where any net will do it is not made.
    """
    blockwise = cfg.model.compile == "blocks" or cfg.model.activation_checkpointing != "none"
    needs_more = cfg.model._target_ != SIMPLE_GPT and (blockwise or cfg.strategy.name not in WHOLE)
    may_refuse = cfg.task == "fit" and cfg.optimizer._target_ != ADAMW
    try:
        if needs_more or may_refuse:
            with torch.device("meta"):
                net = build_net(cfg)
        if needs_more:
            with fits(cfg):
                options = {key: cfg.model[key] for key in MODEL_KEYS}
                check_fit(net, cfg.strategy, dims_of(cfg.strategy, world_size), **options)
        if may_refuse:
            # Of one that needs real weights to begin with, in torch's words or its own.
            with suppress(RuntimeError, AssertionError):
                build_optimizer(cfg, BatchPlan(1, 1, 1), net)
    except ConfigError:
        with suppress(OSError):  # somebody's files are there
            Path(cfg.run_dir).rmdir()  # Hydra has made it
        raise
