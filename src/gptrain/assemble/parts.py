"""What learns, and how: module, the run's lengths, optimizer, schedule."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import get_method
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import Dataset

from gptrain.assemble.load import build_target
from gptrain.core.data_schema import MixtureConfig
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import (
    DEFAULT_DECAY,
    BatchPlan,
    RunLengths,
    effective_max_epochs,
    phase_steps,
    plan_batch,
    run_steps,
    token_steps,
    warmup_steps,
)
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import ANY_NET
from gptrain.lit.metrics import try_metric
from gptrain.lit.module import LanguageModel
from gptrain.lit.strategies.base import check_optimization
from gptrain.loss import LossOptions
from gptrain.optim import decay_groups, scaled_lr
from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.parallel.state import named_extra_parameters

OWN_VALUES = {"loss", "perplexity", "bits_per_byte"}  # of an evaluation, see LanguageModel
LOGGING = ("gptrain.", "lightning.")  # classes of which it is known what they log
# Keys of a group that our own code reads; the rest are arguments of the group's _target_.
PHASES = ("warmup", "decay", "total")
SCHEDULER_KEYS = {f"{phase}_{unit}" for phase in PHASES for unit in ("steps", "tokens")}
SCHEDULER_KEYS |= {"start_factor", "min_factor"}


@contextmanager
def as_config_errors(cfg: RunConfig, key: str = "") -> Generator[None, None, None]:
    """Says which option it is that a part does not fit: an IncompatibleModelError knows it itself.

    Args:
        key: the option that any other ValueError is about, or a keyword that a class does not take.
    Raises: ConfigError.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        key = error.key if isinstance(error, IncompatibleModelError) else key
        if not key or (isinstance(error, TypeError) and "keyword argument" not in str(error)):
            raise
        raise ConfigError.of(key, cfg.value_of(key), str(error)) from error


def batch_of(cfg: RunConfig, data_parallel_size: int) -> BatchPlan:
    """The run's batch arithmetic over the ranks that see different samples."""
    accumulate = cfg.trainer.accumulate_grad_batches
    given = cfg.data.global_batch_size
    return plan_batch(cfg.data.batch_size, given, accumulate, data_parallel_size)


def plan_lengths(
    cfg: RunConfig, n_samples: int, sample_tokens: int | None, data_parallel_size: int
) -> RunLengths:
    """Return batch arithmetic, number of steps, and steps between validations.

    Args:
        n_samples: Samples to train on.
        sample_tokens: Positions of a sample of tokens. None for data that are no tokens: a sample
            counts as one.
    """
    trainer, batch = cfg.trainer, batch_of(cfg, data_parallel_size)
    epoch_steps = max(1, batch.steps_per_epoch(n_samples))
    if trainer.limit_train_batches is not None:
        limit = trainer.limit_train_batches  # micro-batches, or a fraction of the epoch
        limit = int(limit * epoch_steps) if isinstance(limit, float) else limit // batch.accumulate
        epoch_steps = max(1, min(epoch_steps, limit))
    unit = "samples" if sample_tokens is None else "tokens"
    sample_tokens = sample_tokens or 1
    step_tokens, kind = batch.global_batch_size * sample_tokens, "steps"
    if trainer.fast_dev_run:
        n_steps, limit = int(trainer.fast_dev_run), "trainer.fast_dev_run=true"
    elif cfg.max_tokens is not None:
        with as_config_errors(cfg, "max_tokens"):
            n_steps = token_steps(cfg.max_tokens, step_tokens)
        limit, kind = f"max_tokens={cfg.max_tokens:g}", "tokens"
    else:
        max_epochs = effective_max_epochs(trainer, cfg.max_tokens)
        n_steps = run_steps(epoch_steps, max_epochs, trainer.max_steps)
        if n_steps == trainer.max_steps:
            limit = f"trainer.max_steps={n_steps}"
        else:
            limit, kind = f"trainer.max_epochs={max_epochs}", "epochs"
    interval = trainer.val_check_interval
    if isinstance(interval, float):
        interval = max(1, int(interval * epoch_steps * (trainer.check_val_every_n_epoch or 1)))
    interval = interval if n_steps is None else min(interval, n_steps)
    return RunLengths(batch, sample_tokens, epoch_steps, n_steps, interval, limit, kind, unit=unit)


def module_class(cfg: RunConfig, strategy: str) -> type[pl.LightningModule]:
    """The class of the module group. Raises: IncompatibleModelError for one that the
    strategy cannot train.
    """
    made = cast(type[pl.LightningModule], get_method(cfg.module.target))
    if strategy not in ANY_NET and not issubclass(made, LanguageModel):
        raise IncompatibleModelError(
            "module._target_",
            f"a plain LightningModule, and strategy={strategy} partitions a net whose loss it "
            "computes itself; strategies that work: single, ddp, diloco; or a subclass of "
            "gptrain.lit.LanguageModel",
        )
    if "pipeline" in strategy and getattr(made, "loss", None) is not LanguageModel.loss:
        raise IncompatibleModelError(
            "module._target_",
            f"overrides `loss`, and under strategy={strategy} the last stage computes the loss "
            "while the schedule runs; strategies that work: all without pipeline",
        )
    return made


def takes_net(made: type[pl.LightningModule]) -> bool:
    """Whether a module is given the net of the model group; another one makes its own layers."""
    return issubclass(made, LanguageModel) or "net" in inspect.signature(made).parameters


def build_module(
    cfg: RunConfig, net: nn.Module, lengths: RunLengths, val: Dataset | None
) -> pl.LightningModule:
    """The module group's class around the net.

    A LanguageModel gets all that ours takes, a plain LightningModule the net where its signature
    names it; both the other keys of the group.
    """
    made = cast(type[pl.LightningModule], get_method(cfg.module.target))
    options = cfg.module.arguments
    if issubclass(made, LanguageModel):
        token_bytes, metrics = getattr(val, "token_bytes", None), {}
        for name, metric in cfg.module.metric_nodes.items():
            with as_config_errors(cfg, f"module.metrics.{name}"):
                metrics[name] = build_target(metric)
            if isinstance(vocab_size := cfg.model.arguments.get("vocab_size"), int):
                key, target = f"module.metrics.{name}", metric["_target_"]
                try_metric(key, target, metrics[name], vocab_size)
        options |= {
            "net": net,
            "make_optimizer": partial(build_optimizer, cfg, lengths.batch),
            "make_schedule": partial(build_schedule, cfg, lengths),
            "loss": LossOptions(**cfg.module.loss_options),
            "metrics": metrics,
            "token_bytes": None if token_bytes is None else torch.as_tensor(token_bytes),
        }
    elif takes_net(made):
        options["net"] = net
    with as_config_errors(cfg, "module._target_"):
        module = made(**options)
    check_optimization(module)
    return module


def check_names(cfg: RunConfig, module: type[pl.LightningModule]) -> None:
    """Raises: ConfigError for a metric named as a value of ours, or an objective never logged.

    The objective is judged where all that logs is ours or Lightning's; else the first validation
    says it.
    """
    if not issubclass(module, LanguageModel):
        return
    metrics = cfg.module.metric_nodes
    for name in sorted(OWN_VALUES & metrics.keys()):
        message, key = "the module itself logs a value of this name", f"module.metrics.{name}"
        hint = f"module.metrics.my_{name}"
        raise ConfigError.of(key, metrics[name]["_target_"], message, hint=hint)
    targets = (node.target for node in cfg.callbacks.values() if node)
    is_known = module is LanguageModel and all(name.startswith(LOGGING) for name in targets)
    if cfg.task != "fit" or not is_known or cfg.objective.startswith("perf/"):
        return
    parts = cfg.data.parts if isinstance(cfg.data, MixtureConfig) else ()
    parts = {f"{part}/loss" for part in parts}
    names = {f"val/{name}" for name in {*OWN_VALUES, *metrics, *parts}}
    names |= {"train/loss", "lr", "grad_norm", "tokens", "step"}
    if cfg.objective not in names:
        message, allowed = "no value of this name is logged", ", ".join(sorted(names))
        raise ConfigError.of("objective", cfg.objective, message, allowed=allowed)


def build_optimizer(cfg: RunConfig, batch: BatchPlan, module: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer for all trainable parameters, at the schedule's peak learning rate.

    A key that is null is left to the class. A class that makes its own parameter groups has a class
    method `parameter_groups(net, parameters, names, **options)`, as `gptrain.optim.Muon`. It gets
    the options of the group that it names. Those that end in `_lr` are scaled to the batch as
    `optimizer.lr`. For all other classes weight decay is applied to matrices alone.

    Raises:
        ConfigError: If the optimizer cannot take the parameters.
    """
    options = {key: value for key, value in cfg.optimizer.arguments.items() if value is not None}
    target, lr = cfg.optimizer.target, peak_lr(cfg, batch)
    options |= {} if lr is None else {"lr": lr}
    if target.startswith("torch.optim.") and "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))  # torch refuses integers and lists
    with as_config_errors(cfg, "optimizer._target_"):
        optimizer_class = get_method(target)
        if make_groups := getattr(optimizer_class, "parameter_groups", None):
            is_whole = isinstance(module, LanguageModel)  # else a net on the meta device
            net = module.net if is_whole else module
            named = module.named_net() if is_whole else dict(net.named_parameters())
            names = {parameter: name for name, parameter in named.items()}
            own = inspect.signature(make_groups).parameters.keys() & options.keys()
            group_options = {key: options.pop(key) for key in own}
            for key in own:
                if key.endswith("_lr"):
                    group_options[key] = peak_lr(cfg, batch, group_options[key])
            groups = make_groups(net, module.parameters(), names, **group_options)
        else:
            beside = named_extra_parameters(
                module
            )  # in groups of their own: they are never sharded
            of_net = [p for name, p in module.named_parameters() if name not in beside]
            groups = decay_groups(of_net) + decay_groups(beside.values())
        return optimizer_class(groups, **options)


def peak_lr(cfg: RunConfig, batch: BatchPlan, lr: float | None = None) -> float | None:
    """The schedule's peak, scaled to the batch; None for an optimizer without a learning rate.

    Args:
        lr: of a group of parameters; None: optimizer.lr.
    """
    options, lr = cfg.optimizer, lr or cfg.optimizer.lr
    if lr is None:
        taken = inspect.signature(get_method(options.target)).parameters
        lr = taken["lr"].default if "lr" in taken else None
    if not isinstance(lr, int | float):
        return None
    size, reference = batch.global_batch_size, options.reference_batch_size
    return scaled_lr(float(lr), options.lr_scaling, size, reference)


def asked_steps(cfg: RunConfig, phase: str, step_tokens: int) -> float | None:
    """What the scheduler group says of one of PHASES, in steps or as a fraction of the run."""
    asked = cfg.scheduler.phase(phase)
    if asked.tokens is None:
        return asked.steps
    with as_config_errors(cfg, f"scheduler.{phase}_tokens"):
        return token_steps(asked.tokens, step_tokens)


def warmup_of(cfg: RunConfig, lengths: RunLengths) -> int:
    """Steps of the run's warm-up: of its first start, where a resume keeps it, or as asked."""
    if lengths.warmup_steps is not None:
        return lengths.warmup_steps
    asked, total = (asked_steps(cfg, name, lengths.step_tokens) for name in ("warmup", "total"))
    with as_config_errors(cfg, "scheduler.warmup_steps"):
        return warmup_steps(asked, int(total) if total else lengths.n_steps)


def build_schedule(
    cfg: RunConfig, lengths: RunLengths, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Lightning's lr_scheduler entry of the scheduler group: a function of the step, or a class.

    A user's own takes besides its own keys those of our four keywords that it names. One that
    looks at a metric is stepped after each validation, with checkpoint.monitor.
    """
    options, schedule = cfg.scheduler.arguments, get_method(cfg.scheduler.target)
    decay, total = (asked_steps(cfg, name, lengths.step_tokens) for name in ("decay", "total"))
    options["total_steps"] = total_steps = int(total) if total else lengths.n_steps
    options["warmup_steps"] = warmup_of(cfg, lengths)
    named = inspect.signature(schedule).parameters
    if "decay_steps" in named:
        with as_config_errors(cfg, "scheduler.decay_steps"):
            asked = DEFAULT_DECAY if decay is None else decay
            options["decay_steps"] = phase_steps(asked, total_steps)
    options = {k: v for k, v in options.items() if k in named or k not in SCHEDULER_KEYS}
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
