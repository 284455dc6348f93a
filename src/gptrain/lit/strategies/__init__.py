"""Lightning's side of each strategy; the work itself is done by gptrain.parallel."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from gptrain.lit.perf import count_matrix_weights
from gptrain.lit.strategies.base import NetStrategy, StrategyInfo
from gptrain.parallel.activation import (
    apply_activation_checkpointing,
    apply_compile,
    compiles_loss,
)
from gptrain.parallel.fit import Unfit
from gptrain.parallel.mesh import start_group_of_one
from gptrain.plan import ParallelDims
from gptrain.plan.dims import STRATEGIES

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

    The process group exists already where there are several ranks.

    Args:
        make_net: draws the net's seed from torch's CPU generator.
        options: the `strategy` group.
        precision: Lightning's name.
    Raises: Unfit if the net lacks what the strategy needs, or options do not combine.
    """
    name = strategy_name(options.name, dims.world_size)
    if name != "single" and dims.world_size == 1:
        start_group_of_one(device)
    check_options(name, compile, activation_checkpointing, precision)
    about: dict[str, object] = {}

    def make_and_look() -> nn.Module:
        net = make_net()
        about["net_name"] = type(net).__name__  # FSDP changes the class, a pipeline drops layers
        about["n_parameters"] = sum(parameter.numel() for parameter in net.parameters())
        about["n_matrix_weights"] = count_matrix_weights(net)
        return net

    def finish(net: nn.Module) -> None:
        apply_activation_checkpointing(net, activation_checkpointing)
        apply_compile(net, compile)

    net, strategy = resolve_name(STRATEGIES[name].builder)(
        make_and_look,
        finish,
        device,
        options=options,
        dims=dims,
        name=name,
        precision=precision,
        compiles_loss=compiles_loss(compile, device.type),
    )
    strategy.info = StrategyInfo(name, **about)
    return net, strategy


def strategy_name(asked: str, world_size: int) -> str:
    """The row of the table that `strategy.name` means on so many ranks."""
    if asked == "auto":
        return "single" if world_size == 1 else "ddp"
    return asked


def check_options(name: str, compile: str, activation_checkpointing: str, precision: str) -> None:
    """Raises: Unfit for options that do not combine under a strategy."""
    if name in ("single", "ddp"):
        return
    if precision == "16-mixed":
        raise Unfit("trainer.precision", f"{name} does not scale losses; use bf16-mixed")
    if compile == "model":
        wrong = f"under {name} collectives and hooks lie between the blocks; use blocks"
        raise Unfit("model.compile", wrong)
    if "tensor" in name and compile != "none" and activation_checkpointing != "none":
        raise Unfit(
            "model.compile",
            f"under {name} torch cannot compile what is recomputed from sharded weights; use none, "
            f"or activation_checkpointing=none",
        )
