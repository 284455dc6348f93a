"""Builds the optimizer of a run, with its parameter groups and its peak learning rate."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from hydra.utils import get_method
from torch import nn

from gptrain.assemble.config_errors import as_config_errors
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import RunConfig
from gptrain.lit.module import LanguageModel
from gptrain.optim import decay_groups, scaled_lr
from gptrain.parallel.state import named_extra_parameters


def build_optimizer(cfg: RunConfig, batch: BatchPlan, module: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer for all trainable parameters, with the peak learning rate.

    A key that is null is left to the class. Weight decay is applied to matrices alone, unless the
    class makes its own parameter groups: then it has a class method `parameter_groups(net,
    parameters, names, **options)`, as `gptrain.optim.Muon`. This method gets the options that are
    in its signature. Those that end in `_lr` are scaled to the batch, like `optimizer.lr`.

    Args:
        cfg: Configuration of the run.
        batch: Batch arithmetic, to which the learning rate is scaled.
        module: The module, or a net on the meta device.

    Raises:
        ConfigError: If the optimizer does not take an option or its value, or cannot train this
            net, such as Muon a net without `blocks`.
    """
    options = {key: value for key, value in cfg.optimizer.arguments.items() if value is not None}
    target, lr = cfg.optimizer.target, peak_lr(cfg, batch)
    if lr is not None:
        options["lr"] = lr
    if target.startswith("torch.optim.") and "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))  # torch refuses integers and lists
    with as_config_errors(cfg, "optimizer._target_"):
        optimizer_class = get_method(target)
        if make_groups := getattr(optimizer_class, "parameter_groups", None):
            groups = _own_groups(cfg, batch, module, make_groups, options)
        else:
            # Parameters outside the net are never sharded and need groups of their own.
            extra = named_extra_parameters(module)
            of_net = [p for name, p in module.named_parameters() if name not in extra]
            groups = decay_groups(of_net) + decay_groups(extra.values())
        return optimizer_class(groups, **options)


def _own_groups(
    cfg: RunConfig,
    batch: BatchPlan,
    module: nn.Module,
    make_groups: Callable[..., list[dict[str, Any]]],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer whose class makes them itself.

    Args:
        cfg: Configuration of the run.
        batch: Batch arithmetic, to which learning rates are scaled.
        module: The module, or a net on the meta device.
        make_groups: Class method `parameter_groups` of the optimizer.
        options: Options of the optimizer. Those in the signature of `make_groups` are removed.
    """
    if isinstance(module, LanguageModel):
        net, named = module.net, module.named_net()
    else:  # a net on the meta device
        net, named = module, dict(module.named_parameters())
    names = {parameter: name for name, parameter in named.items()}
    own = inspect.signature(make_groups).parameters.keys() & options.keys()
    group_options = {key: options.pop(key) for key in own}
    for key in own:
        if key.endswith("_lr"):
            group_options[key] = peak_lr(cfg, batch, group_options[key])
    return make_groups(net, module.parameters(), names, **group_options)


def peak_lr(cfg: RunConfig, batch: BatchPlan, lr: float | None = None) -> float | None:
    """Return the peak learning rate of the schedule, scaled to the batch by `optimizer.lr_scaling`.

    Args:
        cfg: Configuration of the run.
        batch: Batch arithmetic, to which the learning rate is scaled.
        lr: Learning rate of one parameter group. None stands for `optimizer.lr`, or else for the
            default of the optimizer's class.

    Returns:
        The learning rate, or None for an optimizer without one.
    """
    options = cfg.optimizer
    lr = options.lr if lr is None else lr
    if lr is None:
        parameters = inspect.signature(get_method(options.target)).parameters
        lr = parameters["lr"].default if "lr" in parameters else None
    if not isinstance(lr, int | float):
        return None
    size, reference = batch.global_batch_size, options.reference_batch_size
    return scaled_lr(float(lr), options.lr_scaling, size, reference)
