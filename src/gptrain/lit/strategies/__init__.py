"""Lightning strategies of gptrain, and the function that builds the net and its strategy.

`gptrain.parallel` does the work: partitioning, losses and gradients. This package connects it to
Lightning's loop and to checkpoints.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gptrain.checkpoints import rng
from gptrain.core.strategies import ParallelDims, PipelineOptions, StrategyOptions
from gptrain.lit.strategies.base import GPTStrategy, ManyRanks, OneDevice
from gptrain.parallel.base import Parallel
from gptrain.parallel.compare import Comparison, is_of_library
from gptrain.parallel.pipeline import Pipeline
from gptrain.parallel.placement import allocate, build_on_meta_device, make_net_on


def build_strategy(
    make_net: Callable[[], nn.Module],
    options: StrategyOptions,
    dims: ParallelDims,
    device: torch.device,
    *,
    compile: str = "none",
    activation_checkpointing: str = "none",
    precision: str = "32-true",
    sample: Tensor | None = None,
) -> tuple[nn.Module, GPTStrategy]:
    """Build the part of the net that this rank holds, and the Lightning strategy that trains it.

    The weights are those that a single process would get from the same seed. All ranks must call
    this function. The process group must exist, except for the strategy `single`, and
    `parallel.requirements.check_fit` must have accepted the net.

    Args:
        make_net: Function that builds the full net. It draws the initial weights from PyTorch's
            global CPU generator, and may be called several times.
        options: `strategy` section of the config.
        dims: Number of ranks along each axis.
        device: Device of this rank.
        compile: none, blocks or model, as in `apply_compile`.
        activation_checkpointing: none, selective or full.
        precision: Precision as Lightning names it.
        sample: Tokens (T,) of one sample, on which a user's net is run both in its plain form and
            under the strategy, to compare the results. None skips this comparison.

    Returns:
        The net, on the device of its weights, and the strategy.

    Raises:
        IncompatibleModelError: If the strategy would train another function than the plain net
            computes, or if a block that recomputes has running averages.
    """
    rng_state = rng.capture(device)
    full_net = build_on_meta_device(make_net)
    parallel_class = Pipeline if isinstance(options, PipelineOptions) else Parallel
    parallel = parallel_class(options, dims, device, precision)
    parallel.may_skip_parameters = not is_of_library(full_net)
    recomputes = activation_checkpointing != "none"
    changes = parallel.is_partitioned or parallel.uses_hidden(full_net) or recomputes
    if sample is not None and changes and parallel.may_skip_parameters:  # a net of the user
        Comparison(full_net, make_net, parallel, activation_checkpointing).check(sample)
    rng.restore(rng_state, device)
    modes = {"activation_checkpointing": activation_checkpointing, "compile": compile}
    net = make_net_on(parallel.weights_device, make_net, partial(parallel.partition, **modes))
    strategy = ManyRanks(parallel) if parallel.axes else OneDevice(parallel, device)
    allocate(full_net, "meta")  # keeps tied parameters tied, unlike .to()
    strategy.full_net = full_net
    return net, strategy
