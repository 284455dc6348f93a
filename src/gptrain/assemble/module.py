"""Builds the LightningModule with its metrics."""

import inspect
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import get_method
from torch import nn
from torch.utils.data import Dataset

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.load import build_target
from gptrain.assemble.optimizer import build_optimizer
from gptrain.assemble.schedule import build_schedule
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import RunLengths
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import ANY_NET, PIPELINE, STRATEGIES
from gptrain.lit.module import LanguageModel
from gptrain.lit.strategies.base import check_optimization
from gptrain.loss import LossOptions
from gptrain.parallel.requirements import IncompatibleModelError

# Task -> method that it calls for each batch.
TASK_STEPS = {"fit": "training_step", "test": "test_step", "validate": "validation_step"}
LOGGED = ("loss", "perplexity", "bits_per_byte")  # LanguageModel logs val/<name> itself


def module_class(cfg: RunConfig, strategy: str) -> type[pl.LightningModule]:
    """Return the class of the module group.

    Args:
        cfg: Configuration of the run.
        strategy: Name of the parallelism strategy, a key of STRATEGIES.

    Raises:
        IncompatibleModelError: If the strategy cannot train a module of this class.
    """
    module_type = cast(type[pl.LightningModule], get_method(cfg.module.target))
    if strategy not in ANY_NET and not issubclass(module_type, LanguageModel):
        raise IncompatibleModelError(
            "module._target_",
            f"a plain LightningModule, and strategy={strategy} partitions a net whose loss it "
            f"computes itself; strategies that work: {', '.join(ANY_NET)}; or a subclass of "
            "gptrain.lit.LanguageModel",
        )
    if (
        PIPELINE in STRATEGIES[strategy].axes
        and getattr(module_type, "loss", None) is not LanguageModel.loss
    ):
        raise IncompatibleModelError(
            "module._target_",
            f"overrides `loss`, and under strategy={strategy} the last stage computes the loss "
            "while the schedule runs; strategies that work: all without pipeline",
        )
    return module_type


def check_steps(cfg: RunConfig, module_type: type[pl.LightningModule]) -> None:
    """Check that a module has the method that the task of the run calls for each batch.

    Args:
        cfg: Configuration of the run.
        module_type: Class of the module group.

    Raises:
        ConfigError: If the method is missing, such as `test_step` for task=test.
    """
    step = TASK_STEPS[cfg.task]
    if not has_step(module_type, step):
        hint = f"a method {step}"
        if cfg.task == "test" and has_step(module_type, "validation_step"):
            hint = f"task=validate, or {hint}"
        message = f"{module_type.__name__} has no {step}, which task={cfg.task} calls"
        raise ConfigError.of("module._target_", cfg.module.target, message, hint=hint)


def check_metrics(cfg: RunConfig, module_type: type[pl.LightningModule]) -> None:
    """Check that no metric replaces a value that LanguageModel logs itself.

    Args:
        cfg: Configuration of the run.
        module_type: Class of the module group.

    Raises:
        ConfigError: If a metric has the name of such a value.
    """
    nodes = cfg.module.metric_nodes if issubclass(module_type, LanguageModel) else {}
    for name in set(LOGGED) & nodes.keys():
        key, message = f"module.metrics.{name}", "the module itself logs a value of this name"
        hint = f"module.metrics.my_{name}"
        raise ConfigError.of(key, nodes[name]["_target_"], message, hint=hint)


def has_step(module_type: type[pl.LightningModule], step: str) -> bool:
    """Return whether a module's class defines a method that LightningModule only declares.

    Args:
        module_type: Class of a LightningModule.
        step: Name of the method, such as `test_step`.
    """
    return getattr(module_type, step) is not getattr(pl.LightningModule, step)


def takes_net(module_type: type[pl.LightningModule]) -> bool:
    """Return whether a module is built with the net of the model group.

    A class whose arguments do not include `net` makes its own layers. A LanguageModel always gets
    the net.
    """
    is_ours = issubclass(module_type, LanguageModel)
    return is_ours or "net" in inspect.signature(module_type).parameters


def build_module(
    cfg: RunConfig, net: nn.Module, lengths: RunLengths, val: Dataset | None
) -> pl.LightningModule:
    """Build the module around the net.

    A LanguageModel gets the net, the factories of optimizer and schedule, the loss options and the
    metrics. A plain LightningModule gets the net if its signature names it. Both get the other keys
    of the module group.

    Args:
        cfg: Configuration of the run.
        net: Net, or the part of it that this rank holds.
        lengths: Batch arithmetic and number of steps, for the learning rate and the schedule.
        val: Validation set, which may know the number of bytes of each token. None if it is not
            read.

    Raises:
        ConfigError: If a class does not take its keys, or a metric cannot be evaluated.
        IncompatibleModelError: If the module optimizes manually.
    """
    module_type = cast(type[pl.LightningModule], get_method(cfg.module.target))
    options: dict[str, Any] = cfg.module.arguments
    if issubclass(module_type, LanguageModel):
        token_bytes = getattr(val, "token_bytes", None)
        options |= {
            "net": net,
            "make_optimizer": partial(build_optimizer, cfg, lengths.batch),
            "make_schedule": partial(build_schedule, cfg, lengths),
            "loss": LossOptions(**cfg.module.loss_options),
            "metrics": _build_metrics(cfg),
            "token_bytes": None if token_bytes is None else torch.as_tensor(token_bytes),
        }
    elif takes_net(module_type):
        options["net"] = net
    with as_config_errors(cfg, "module._target_"):
        module = module_type(**options)
    check_optimization(module)
    return module


def _build_metrics(cfg: RunConfig) -> dict[str, Any]:
    """Build the metrics of the module group, and return them by their names.

    Raises:
        ConfigError: If a metric cannot be built.
    """
    metrics = {}
    for name, node in cfg.module.metric_nodes.items():
        key = f"module.metrics.{name}"
        with as_config_errors(cfg, key):
            metrics[name] = build_target(node, key)
    return metrics
