"""Lightning's side of the strategies, one shell; the work itself is done by gptrain.parallel."""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gptrain.checkpoints import rng
from gptrain.core.strategies import (
    STRATEGIES,
    ParallelDims,
    StrategyOptions,
    strategy_name,
)
from gptrain.lit.perf import count_matrix_weights
from gptrain.lit.strategies.base import LightningStrategy, StrategyInfo
from gptrain.parallel.activation import apply_activation_checkpointing, apply_compile
from gptrain.parallel.comparison import Comparison, needs_comparison
from gptrain.parallel.placement import build_on_meta_device, make_net_on
from gptrain.parallel.strategy import ParallelStrategy

__all__ = ["LightningStrategy", "build_strategy"]


def build_strategy(
    make_net: Callable[[], nn.Module],
    options: StrategyOptions,
    dims: ParallelDims,
    device: torch.device,
    *,
    compile: str = "none",
    activation_checkpointing: str = "none",
    precision: str = "32-true",
    n_nodes: int = 1,
    sample: Tensor | None = None,
) -> tuple[nn.Module, LightningStrategy]:
    """The net as this rank holds it, with the weights of a single process, and its strategy.

    The process group exists already, but for `single`; that the net fits was checked before.

    Args:
        make_net: draws the net's seed from torch's CPU generator.
        options: the `strategy` group.
        precision: Lightning's name.
        sample: Tokens (T,) on which a net that is not the library's own is compared with its plain
            form, before it is made. None compares nothing.

    Raises:
        IncompatibleModelError: If the strategy would train another function than the net's.
    """
    name = strategy_name(options.name, dims.world_size)
    with torch.random.fork_rng(devices=[]):
        whole = build_on_meta_device(make_net)
    made: type[ParallelStrategy] = resolve_name(STRATEGIES[name].made)
    with unset_fake_temporarily():  # a plan traces without numbers, but ranks are counted by some
        parallel = made(options, dims, device, precision, n_nodes)

    @unset_fake_temporarily()
    def partition(net: Any, parallel: ParallelStrategy = parallel, compile: str = compile) -> None:
        parallel.split(net)
        apply_activation_checkpointing(net, activation_checkpointing)
        apply_compile(net, compile)
        parallel.shard(net)

    place = "cpu" if options.keeps_weights_on_cpu else device
    if sample is not None and needs_comparison(whole, parallel, activation_checkpointing):
        before = rng.capture()

        def make_again() -> nn.Module:
            rng.restore(before)
            return make_net()

        try:
            eager = partial(partition, compile="none")
            Comparison(make_again, eager, parallel, place, *contract_of(name, whole)).check(sample)
        finally:
            rng.restore(before)
    net = make_net_on(place, make_net, partition)
    strategy: LightningStrategy = resolve_name(STRATEGIES[name].lightning)(parallel)
    n_parameters = sum(parameter.numel() for parameter in whole.parameters())
    n_matrix_weights = count_matrix_weights(whole)
    strategy.info = StrategyInfo(name, type(whole).__name__, n_parameters, n_matrix_weights)
    return net, strategy


def contract_of(name: str, net: nn.Module) -> tuple[str, str]:
    """Return the key and the end of the message for a net that breaks a strategy's contract."""
    row = STRATEGIES[name]
    contract = f"{row.contract} (see gptrain.models)"
    if not row.check:  # it runs any net; the net contradicts itself
        return "model._target_", contract
    others = [
        other
        for other, it in STRATEGIES.items()
        if not it.check and all(hasattr(net, need) for need in it.needs)
    ]
    return "strategy.name", f"{contract}; strategies that work without: {', '.join(others)}"
