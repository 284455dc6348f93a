"""What learns, from what and how: net, datasets, module, the run's lengths, optimizer, schedule."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, Subset

from gptrain.lit.losses import LossOptions
from gptrain.lit.module import LanguageModel, lambda_schedule
from gptrain.lit.strategies.base import named_beside_net
from gptrain.optim import decay_groups, muon_groups, scaled_lr
from gptrain.parallel.activation import compiles_loss
from gptrain.parallel.fit import Unfit
from gptrain.plan import (
    BatchPlan,
    Lengths,
    effective_max_epochs,
    plan_batch,
    run_steps,
    token_steps,
    warmup_steps,
)
from gptrain.problems import BAD_DATA, ConfigError

# Keys of a group that our own code reads; the rest are arguments of the group's _target_.
MODEL_KEYS = {"compile", "activation_checkpointing"}
OPTIMIZER_KEYS = {"lr", "weight_decay", "lr_scaling", "reference_batch_size"}
SCHEDULER_KEYS = {"warmup_steps", "total_steps", "start_factor", "min_factor"}
MUON = "gptrain.optim.Muon"


def build_target(node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """What a node's `_target_` makes of plain lists and dicts; raises what that raises, itself.

    Only by its own type a DataError, or a disk that is full, gets the exit code that it means.
    """
    try:
        return instantiate(node, *args, _convert_="all", **kwargs)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def build_net(cfg: DictConfig) -> nn.Module:
    """The net of the model group, with initial weights that depend on torch's seed alone."""
    keys = [key for key in cfg.model if key not in MODEL_KEYS]
    return build_target(OmegaConf.masked_copy(cfg.model, keys))


@contextmanager
def unfit_is_told(cfg: DictConfig) -> Iterator[None]:
    """Says which option it is that a net or a module does not fit. Raises: ConfigError."""
    try:
        yield
    except Unfit as error:
        raise ConfigError.of(error.key, OmegaConf.select(cfg, error.key), str(error)) from error


def build_datasets(cfg: DictConfig) -> list[Dataset | None]:
    """Train, validation and test set, prepared where that is needed; None: no test set is given."""
    parts = ("train", "val", "test")
    return [build_target(cfg.data[part]) if part in cfg.data else None for part in parts]


def check_sample(cfg: DictConfig, sample: Any) -> int:
    """Positions of one sample: the length of its first sequence of tokens.

    Raises: ConfigError where it has tokens that the net has no embedding for. On a GPU the first
        step would end in an assertion of the device that names nothing.
    """
    values = sample.values() if isinstance(sample, dict) else sample
    values = [values] if isinstance(values, Tensor) else list(values)
    sequences = [
        v for v in values if isinstance(v, Tensor) and v.ndim and not v.is_floating_point()
    ]
    if not sequences:
        return 1
    vocab_size, highest = cfg.model.get("vocab_size"), int(max(v.max() for v in sequences))
    if isinstance(vocab_size, int) and highest >= vocab_size:
        wrong = f"data.train has token {highest} in its first sample"
        attempt = f"model.vocab_size={highest + 1} or above"
        raise ConfigError.of("model.vocab_size", vocab_size, wrong, attempt=attempt, code=BAD_DATA)
    return len(sequences[0])


def first_batches(dataset: Dataset, batches: float, sequences: int) -> Dataset:
    """The first `batches` micro-batches (a fraction: of all), seen again and again.

    Args:
        sequences: in one micro-batch over all ranks.
    """
    n_samples = int(batches * len(dataset)) if isinstance(batches, float) else batches * sequences
    return Subset(dataset, range(min(len(dataset), max(n_samples, sequences))))


def plan_lengths(
    cfg: DictConfig, n_samples: int, sample_tokens: int, data_parallel_size: int
) -> Lengths:
    """Batch arithmetic, number of steps, and steps between validations.

    Args:
        n_samples: sequences to train on.   sample_tokens: positions of one.
    """
    trainer = cfg.trainer
    batch = plan_batch(
        cfg.data.batch_size,
        cfg.data.global_batch_size,
        trainer.accumulate_grad_batches,
        data_parallel_size,
    )
    epoch_steps = max(1, batch.steps_per_epoch(n_samples))
    if trainer.limit_train_batches is not None:
        limit = trainer.limit_train_batches  # micro-batches, or a fraction of the epoch
        limit = int(limit * epoch_steps) if isinstance(limit, float) else limit // batch.accumulate
        epoch_steps = max(1, min(epoch_steps, limit))
    step_tokens = batch.global_batch_size * sample_tokens
    if trainer.fast_dev_run:
        n_steps = int(trainer.fast_dev_run)
    elif cfg.max_tokens is not None:
        with _named("max_tokens", f"{cfg.max_tokens:g}"):
            n_steps = token_steps(cfg.max_tokens, step_tokens)
    else:
        max_epochs = effective_max_epochs(trainer, cfg.max_tokens)
        n_steps = run_steps(epoch_steps, max_epochs, trainer.max_steps)
    interval = trainer.val_check_interval
    if isinstance(interval, float):
        interval = max(1, int(interval * epoch_steps * (trainer.check_val_every_n_epoch or 1)))
    interval = interval if n_steps is None else min(interval, n_steps)
    return Lengths(batch, sample_tokens, epoch_steps, n_steps, interval)


def module_class(cfg: DictConfig) -> type[pl.LightningModule]:
    """The class of the module group."""
    return get_method(cfg.module._target_)


def build_module(
    cfg: DictConfig, net: nn.Module, lengths: Lengths, accelerator: str, val: Dataset
) -> pl.LightningModule:
    """The module group's class around the net.

    A LanguageModel gets all that ours takes, a plain LightningModule the net where its signature
    names it; both the other keys of the group.
    """
    made = module_class(cfg)
    node = OmegaConf.to_container(cfg.module, resolve=True)
    loss, metrics = node.get("loss") or {}, node.get("metrics") or {}
    options = {k: v for k, v in node.items() if k not in ("_target_", "loss", "metrics")}
    if issubclass(made, LanguageModel):
        options |= {
            "net": net,
            "make_optimizer": partial(build_optimizer, cfg, lengths.batch),
            "make_schedule": partial(build_schedule, cfg, lengths),
            "loss": LossOptions(**loss, compiles=compiles_loss(cfg.model.compile, accelerator)),
            "metrics": {name: build_target(metrics[name]) for name in metrics},
            "token_bytes": bytes_of_tokens(val),
        }
    else:
        named = inspect.signature(made).parameters
        offered = {"net": net, "loss": loss, "metrics": metrics}
        options |= {k: v for k, v in offered.items() if k in named and (v or k == "net")}
    try:
        return made(**options)
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        raise Unfit("module._target_", str(error)) from error


def bytes_of_tokens(dataset: Dataset) -> Tensor | None:
    """(V,) bytes of text that each token stands for, where the dataset knows."""
    counts = getattr(dataset, "token_bytes", None)
    return None if counts is None else torch.as_tensor(counts)


def build_optimizer(cfg: DictConfig, batch: BatchPlan, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the group over all that a module trains, at the schedule's peak.

    Of a user's own class only its name must be given: lr and weight_decay, where they are not,
    are the class's defaults, and the decay still goes to matrices alone.

    Raises: ConfigError where the optimizer cannot take the parameters, or its arguments.
    """
    options = _arguments(cfg.optimizer, OPTIMIZER_KEYS)
    target = options.pop("_target_")
    make = get_method(target)
    if target.startswith("torch.optim.") and "betas" in options:
        options["betas"] = tuple(map(float, options["betas"]))  # torch refuses integers and lists
    decay = _given_or_default(cfg, "weight_decay", 0.0)
    lr = peak_lr(cfg, batch)
    options = options if lr is None else {**options, "lr": lr}
    with _named("optimizer._target_", target):
        if target == MUON:
            net = module.net if isinstance(module, LanguageModel) else module
            return make(muon_groups(net, decay, module.named_parameters()), **options)
        beside = named_beside_net(module)  # in groups of their own: they are never sharded
        of_net = [(name, p) for name, p in module.named_parameters() if name not in beside]
        groups = decay_groups(of_net, decay) + decay_groups(beside.items(), decay)
        return make(groups, **options)


def peak_lr(cfg: DictConfig, batch: BatchPlan) -> float | None:
    """The schedule's peak, scaled to the batch; None for an optimizer without a learning rate."""
    lr = _given_or_default(cfg, "lr", None)
    if lr is None:
        return None
    return scaled_lr(
        float(lr),
        cfg.optimizer.lr_scaling,
        batch.global_batch_size,
        cfg.optimizer.reference_batch_size,
    )


def build_schedule(
    cfg: DictConfig, lengths: Lengths, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Lightning's lr_scheduler entry of the scheduler group: a function of the step, or a class.

    A user's own takes besides its own keys those of our four keywords that it names. One that
    looks at a metric is stepped after each validation, with checkpoint.monitor.
    """
    total_steps = cfg.scheduler.total_steps or lengths.n_steps
    options = _arguments(cfg.scheduler, SCHEDULER_KEYS)
    schedule = get_method(options.pop("_target_"))
    with _named("scheduler.warmup_steps", cfg.scheduler.warmup_steps):
        warmup = warmup_steps(cfg.scheduler.warmup_steps, total_steps)
    ours = {
        "warmup_steps": warmup,
        "total_steps": total_steps,
        "start_factor": cfg.scheduler.start_factor,
        "min_factor": cfg.scheduler.min_factor,
    }
    named = inspect.signature(schedule).parameters
    options |= {key: ours[key] for key in ours if key in named and key not in options}
    if not inspect.isclass(schedule):
        return {"scheduler": lambda_schedule(optimizer, partial(schedule, **options))}
    if not issubclass(schedule, ReduceLROnPlateau):
        return {"scheduler": schedule(optimizer, **options)}
    frequency = lengths.validate_every * lengths.batch.accumulate
    return {
        "scheduler": schedule(optimizer, **{"mode": cfg.checkpoint.mode, **options}),
        "monitor": cfg.checkpoint.monitor,
        "frequency": frequency,
    }


def _given_or_default(cfg: DictConfig, key: str, otherwise: float | None) -> Any:
    """A key of the optimizer group; where it is not given, the default of the class itself."""
    target = cfg.optimizer._target_
    taken = inspect.signature(get_method(target)).parameters
    if cfg.optimizer.get(key) is not None:
        if key not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            raise ConfigError.of(f"optimizer.{key}", cfg.optimizer[key], f"{target} takes no {key}")
        return cfg.optimizer[key]
    default = taken[key].default if key in taken else inspect.Parameter.empty
    return otherwise if default is inspect.Parameter.empty else default


def _arguments(node: DictConfig, ours: set[str]) -> dict[str, Any]:
    """What a group holds for its _target_, and the name of that."""
    plain = OmegaConf.to_container(node, resolve=True)
    return {key: value for key, value in plain.items() if key not in ours}


@contextmanager
def _named(key: str, value: object) -> Iterator[None]:
    """Says which key a ValueError is about."""
    try:
        yield
    except ValueError as error:
        raise ConfigError.of(key, value, str(error)) from error
