"""Conversion of metric values to logged scalars, and a trial of each metric before training."""

import copy
import logging
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gptrain.checkpoints.rng import capture, restore
from gptrain.core.errors import DONE, ConfigError, ConfigIssue, first_line

log = logging.getLogger(__name__)
MAX_SCALARS = 256  # per metric, because each scalar is logged under a name of its own
N_TRIAL_POSITIONS = 16  # positions of the random batch on which a metric is tried


class MetricError(RuntimeError):
    """An error of a metric in an evaluation. The message names the metric's config key."""


@contextmanager
def named_in_errors(name: str) -> Generator[None, None, None]:
    """Turn any Exception of the block into a MetricError that names the metric's config key.

    Args:
        name: Name of the metric in the config group `module.metrics`.

    Raises:
        MetricError: If the block raises an Exception. The message contains the message of this
            Exception, because gptrain recognizes the cause (out of memory, a lost rank) by it.
    """
    try:
        yield
    except Exception as error:
        message = f"module.metrics.{name}: {type(error).__name__}: {error}"
        raise MetricError(message) from error


def named_scalars(name: str, value: Any) -> dict[str, Tensor]:
    """Return the value of a metric as a dict: logged name -> scalar tensor.

    A value with one element keeps the name. The elements of a larger tensor or of a list get a
    number, such as `f1/0` and `f1/1`, and the values of a dict get their key, such as
    `rouge/fmeasure`. Nested values get several of these. An empty value gives no entry.

    Args:
        name: Logged name of the metric.
        value: Result of the metric's compute().

    Raises:
        ValueError: If a part of the value is not a number, or if there are more than MAX_SCALARS.
    """
    if isinstance(value, Mapping):
        parts = [named_scalars(f"{name}/{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [named_scalars(f"{name}/{i}", item) for i, item in enumerate(value)]
    else:
        if not isinstance(value, Tensor | int | float):
            raise ValueError(f"its value is a {type(value).__name__}; allowed: numbers")
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1:
            return {name: tensor.reshape(())}
        if tensor.numel() > MAX_SCALARS:
            shape = tuple(tensor.shape)
            raise ValueError(f"its value has shape {shape}; allowed: at most {MAX_SCALARS} numbers")
        parts = [named_scalars(f"{name}/{i}", item) for i, item in enumerate(tensor)]
    scalars = {key: scalar for part in parts for key, scalar in part.items()}
    if len(scalars) > MAX_SCALARS:
        raise ValueError(f"its value has {len(scalars)} numbers; allowed: at most {MAX_SCALARS}")
    return scalars


def try_metric(key: str, target: str, metric: nn.Module, vocab_size: int) -> None:
    """Evaluate a copy of a metric on a random batch, to find errors before training.

    The metric's state and all random generators are left unchanged. If a metric that is not from
    torchmetrics fails, only a warning is logged: the metric may need real data.

    Args:
        key: Config key that an error names.
        target: Value of the key: the `_target_` of the metric.
        metric: Metric that is updated with logits (N, V) and targets (N,).
        vocab_size: Number of logits V.

    Raises:
        ConfigError: If a metric of torchmetrics fails, or if the value of any metric cannot be
            logged because it is not made of at most MAX_SCALARS numbers.
    """
    rng_state = capture()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(N_TRIAL_POSITIONS, vocab_size, generator=generator)  # (N, V)
    targets = torch.randint(vocab_size, (N_TRIAL_POSITIONS,), generator=generator)  # (N,)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial: Any = copy.deepcopy(metric)
            for part in trial.modules():
                # NCCL, the backend of GPUs, cannot reduce the trial's CPU tensors over the ranks.
                part.distributed_available_fn = lambda: False
            trial.update(logits, targets)
            value = trial.compute()
    except Exception as error:
        message = (
            f"fails on logits ({N_TRIAL_POSITIONS}, {vocab_size}) and targets "
            f"({N_TRIAL_POSITIONS},): {type(error).__name__}: {first_line(error)}"
        )
        if target.startswith("torchmetrics."):
            raise ConfigError.of(key, target, message) from error
        log.warning("%s", ConfigIssue(key, target, message, code=DONE).line)
        return
    finally:
        restore(rng_state)
    try:
        named_scalars("", value)
    except ValueError as error:
        hint = "a metric with one value (average: macro), or a callback that logs what you need"
        raise ConfigError.of(key, target, str(error), hint=hint) from error
