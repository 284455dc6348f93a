"""Builds the LightningModule, its metrics, its optimizer and its learning-rate schedule."""

import inspect
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import get_method
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.load import build_target
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan, RunLengths, phase_steps
from gptrain.core.schema import RunConfig, StableDecayConfig
from gptrain.core.strategies import ANY_NET, PIPELINE, STRATEGIES, strategy_name
from gptrain.lit.module import LanguageModel
from gptrain.loss import LossOptions
from gptrain.optim import decay_groups, scaled_lr
from gptrain.parallel.state import named_extra_parameters, reshard

_LOGGED = {"loss", "perplexity", "bits_per_byte"}  # LanguageModel logs val/<name> itself


def module_class(cfg: RunConfig, world_size: int) -> type[pl.LightningModule]:
    """Return the class of `cfg.module`, if the strategy can train it.

    `world_size` is the number of ranks, which determines what strategy=auto stands for.

    Raises:
        ConfigError: If the strategy needs a LanguageModel and the class is another one, if the
            class overrides `loss` and the strategy has a pipeline, or if a metric of a
            LanguageModel has the name of a value that it logs itself.
    """
    strategy = strategy_name(cfg.strategy.name, world_size)
    module_type = cast(type[pl.LightningModule], get_method(cfg.module.target))
    is_language_model = issubclass(module_type, LanguageModel)
    if strategy not in ANY_NET and not is_language_model:
        message = f"not a gptrain.lit.LanguageModel, whose loss strategy={strategy} computes itself"
        message += f"; strategies that work: {', '.join(ANY_NET)}"
        raise ConfigError.of("module._target_", cfg.module.target, message)
    is_own = getattr(module_type, "loss", None) is not LanguageModel.loss
    if is_own and PIPELINE in STRATEGIES[strategy].axes:
        message = f"overrides `loss`, which the stages of strategy={strategy} do not call"
        raise ConfigError.of("module._target_", cfg.module.target, message)
    names = _LOGGED.intersection(cfg.module.plain().get("metrics") or {})
    if names and is_language_model:
        message = "the module itself logs a value of this name"
        raise ConfigError.of(f"module.metrics.{min(names)}", None, message)
    return module_type


def build_module(
    cfg: RunConfig, net: nn.Module, lengths: RunLengths, val: Any
) -> pl.LightningModule:
    """Build the LightningModule of a run, with the keys of `cfg.module` as its arguments.

    A LanguageModel also gets the net, the functions that make its optimizer and its schedule, the
    loss options and the metrics. Any other module gets the net only if its signature names `net`.

    Args:
        net: Net as the strategy has partitioned it.
        val: Validation set. Its attribute `token_bytes`, if it has one, has the number of bytes of
            each token, for bits per byte.

    Raises:
        ConfigError: If the module or a metric refuses its arguments.
    """
    module_type = cast(type[pl.LightningModule], get_method(cfg.module.target))
    options: dict[str, Any] = cfg.module.arguments
    if issubclass(module_type, LanguageModel):
        own, metrics, token_bytes = cfg.module.plain(), {}, getattr(val, "token_bytes", None)
        for name, node in (own.get("metrics") or {}).items():
            with as_config_errors(cfg, key := f"module.metrics.{name}"):
                metrics[name] = build_target(node, key)
        options |= {
            "net": net,
            "make_optimizer": partial(build_optimizer, cfg, lengths.batch),
            "make_schedule": partial(build_schedule, cfg, lengths),
            "loss": LossOptions(**(own.get("loss") or {})),
            "metrics": metrics,
            "token_bytes": None if token_bytes is None else torch.as_tensor(token_bytes),
        }
    elif "net" in inspect.signature(module_type).parameters:
        options["net"] = net
    with as_config_errors(cfg, "module._target_"):
        return module_type(**options)


# Optimizer and schedule


def build_optimizer(cfg: RunConfig, batch: BatchPlan, module: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of `cfg.optimizer` for all trainable parameters of a module.

    A key that is null is left to the class. The learning rate is `peak_lr`. Only parameters of two
    or more dimensions have weight decay, unless the class makes its own groups by a class method
    `parameter_groups`, as `gptrain.optim.Muon`.

    Args:
        batch: Batch plan of the run, to whose size the learning rates are scaled.
        module: LightningModule of the run, or a net on the meta device, to check the arguments.

    Raises:
        ConfigError: If the class does not take the arguments, or refuses their values.
    """
    options = cfg.optimizer.arguments | {"lr": peak_lr(cfg, batch)}
    options = {key: value for key, value in options.items() if value is not None}
    with as_config_errors(cfg, "optimizer._target_"):
        optimizer_class = get_method(cfg.optimizer.target)
        if make_groups := getattr(optimizer_class, "parameter_groups", None):
            reshard(module)  # the optimizer must get FSDP's shards, not the full weights
            # Otherwise it is a net on the meta device.
            net = module.net if isinstance(module, LanguageModel) else module
            names = {parameter: name for name, parameter in net.named_parameters()}
            keys = inspect.signature(make_groups).parameters.keys() & options.keys()
            own = {key: options.pop(key) for key in keys}
            own |= {key: peak_lr(cfg, batch, lr) for key, lr in own.items() if key.endswith("_lr")}
            groups = make_groups(net, module.parameters(), names, **own)
        else:
            # Parameters outside the net are never sharded and need groups of their own.
            extra = named_extra_parameters(module)
            of_net = [p for name, p in module.named_parameters() if name not in extra]
            groups = decay_groups(of_net) + decay_groups(extra.values())
        return optimizer_class(groups, **options)


def peak_lr(cfg: RunConfig, batch: BatchPlan, lr: float | None = None) -> float | None:
    """Return a learning rate as `optimizer.lr_scaling` scales it to the batch of the run.

    Args:
        lr: Learning rate for `optimizer.reference_batch_size` sequences. None takes `optimizer.lr`,
            or if that is null the default of the optimizer's class.

    Returns:
        The scaled learning rate, or None if the class has no default that is a number.
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


def build_schedule(
    cfg: RunConfig, lengths: RunLengths, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Build the learning-rate schedule, as the entry `lr_scheduler` of configure_optimizers.

    The target is a scheduler class, or a function `(step, **keys) -> factor` of the peak learning
    rate. It gets its own keys, and those of StableDecayConfig that are in its signature: the
    lengths of phases in optimizer steps. A ReduceLROnPlateau follows `checkpoint.monitor`.

    Raises:
        ConfigError: If the length of a phase is not known, see `phase_steps`. Errors of the target
            pass unchanged.
    """
    options, schedule = cfg.scheduler.arguments, get_method(cfg.scheduler.target)
    parameters = inspect.signature(schedule).parameters
    for phase in ("warmup", "decay", "total"):
        if f"{phase}_steps" in parameters:
            options[f"{phase}_steps"] = phase_steps(cfg, phase, lengths)
    ours = StableDecayConfig.model_fields  # keys that gptrain reads, for any schedule
    options = {k: v for k, v in options.items() if k in parameters or k not in ours}
    if not inspect.isclass(schedule):
        return {"scheduler": LambdaLR(optimizer, partial(schedule, **options))}
    if not issubclass(schedule, ReduceLROnPlateau):
        return {"scheduler": schedule(optimizer, **options)}
    options.setdefault("mode", cfg.checkpoint.mode)
    return {
        "scheduler": schedule(optimizer, **options),
        "monitor": cfg.checkpoint.monitor,
        "frequency": lengths.validate_every * lengths.batch.accumulate,
    }
