"""Lightning's side of each strategy; the work itself is done by gptrain.parallel."""

from collections.abc import Callable
from pkgutil import resolve_name

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from gptrain.lit.perf import count_matrix_weights
from gptrain.lit.strategies.base import BuildArgs, NetStrategy, StrategyInfo
from gptrain.parallel.activation import apply_activation_checkpointing, apply_compile
from gptrain.parallel.dims import STRATEGIES, ParallelDims, strategy_name
from gptrain.parallel.slices import make_to_look_at

__all__ = ["NetStrategy", "build_strategy"]


def build_strategy(
    make_net: Callable[[], nn.Module],
    options,
    dims: ParallelDims,
    device: torch.device,
    *,
    compile: str = "none",
    activation_checkpointing: str = "none",
    precision: str = "32-true",
) -> tuple[nn.Module, Strategy]:
    """The net as this rank holds it, with the weights of a single process, and its strategy.

    The process group exists already, but for `single`; that the net fits was checked before.

    Args:
        make_net: draws the net's seed from torch's CPU generator.
        options: the `strategy` group.
        precision: Lightning's name.
    """
    name = strategy_name(options.name, dims.world_size)
    with torch.random.fork_rng(devices=[]):
        whole = make_to_look_at(make_net)

    def finish(net: nn.Module) -> None:
        apply_activation_checkpointing(net, activation_checkpointing)
        apply_compile(net, compile)

    args = BuildArgs(make_net, finish, device, options, dims, precision)
    net, strategy = resolve_name(STRATEGIES[name].builder)(args)
    n_parameters = sum(parameter.numel() for parameter in whole.parameters())
    n_matrix_weights = count_matrix_weights(whole)
    strategy.info = StrategyInfo(name, type(whole).__name__, n_parameters, n_matrix_weights)
    return net, strategy
