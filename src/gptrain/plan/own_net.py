"""The plan of a net without formulas: what is exact without running a step on the device."""

from functools import partial
from typing import Any

import torch
from torch import nn

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.load import build_net
from gptrain.core.precision import TYPE_BYTES, find_precision
from gptrain.core.schema import RunConfig
from gptrain.costs.choice import optimizer_states
from gptrain.costs.hardware import Machine
from gptrain.parallel.placement import build_on_meta_device


def plan_own_net(cfg: RunConfig, machine: Machine, n_nodes: int) -> dict[str, Any]:
    """Return the plan of a net without formulas, in the form of `gptrain.costs.choice.compare`.

    The strategies are `single`, and on several devices `ddp`, and `fsdp` if the net has `blocks`
    and the option `replicas` divides the devices. Their entries have `bytes_per_device`, with the
    exact bytes of weights, gradients and optimizer states, and `fits`, which is False if these
    alone do not fit, else None. `best` and `changes` are None.

    Args:
        cfg: Configuration of the run, with a precision other than "auto".

    Raises:
        ConfigError: If the net cannot be built.
    """
    with as_config_errors(cfg, "model._target_"):
        net = build_on_meta_device(partial(build_net, cfg.model))
    value_bytes = TYPE_BYTES[find_precision(cfg.trainer.precision).weights]
    n_states = optimizer_states(cfg.optimizer.target, cfg.optimizer.arguments)
    hidden = {p for p in getattr(net, "blocks", nn.Module()).parameters() if p.ndim >= 2}
    world_size, copies = machine.n_local * n_nodes, getattr(cfg.strategy, "replicas", 1)
    shards, rows = {"single": 1}, {}
    if world_size > 1:
        shards["ddp"] = 1
        if hasattr(net, "blocks") and world_size % copies == 0:
            shards["fsdp"] = world_size // copies
    for name, n_shards in shards.items():
        sizes = {p: torch.atleast_1d(p).chunk(n_shards)[0].numel() for p in net.parameters()}
        trained = {p: size for p, size in sizes.items() if p.requires_grad}
        states = sum(size * n_states[0 if p in hidden else 1] for p, size in trained.items())
        numbers = {"weights": sum(sizes.values()), "gradients": sum(trained.values())}
        held = {part: value_bytes * n for part, n in {**numbers, "optimizer": states}.items()}
        fits = False if sum(held.values()) > machine.memory_bytes else None
        rows[name] = {"bytes_per_device": held, "fits": fits}
    n_parameters = sum(parameter.numel() for parameter in net.parameters())
    return {"parameters": n_parameters, "strategies": rows, "best": None, "changes": None}
