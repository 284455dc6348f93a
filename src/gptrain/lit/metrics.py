"""Values of metrics as named numbers, and a trial of each metric before the first step."""

import copy
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gptrain.checkpoints.rng import capture, restore
from gptrain.core.errors import DONE, ConfigError, ConfigIssue, first_line

log = logging.getLogger(__name__)
MOST_NUMBERS = 256  # of one metric: each is a logged name of its own
N_POSITIONS = 16  # of the made-up batch


def named_numbers(name: str, value: Any) -> dict[str, Tensor]:
    """Return a metric's value as scalars: `f1/0`, `f1/1` of a vector, `rouge/fmeasure` of a dict.

    Raises: ValueError for what is not made of numbers, and for more than MOST_NUMBERS.
    """
    if isinstance(value, Mapping):
        parts = [named_numbers(f"{name}/{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [named_numbers(f"{name}/{i}", item) for i, item in enumerate(value)]
    else:
        if not isinstance(value, Tensor | int | float):
            raise ValueError(f"its value is a {type(value).__name__}, which is no number")
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1:
            return {name: tensor.reshape(())}
        if tensor.numel() > MOST_NUMBERS:
            shape = tuple(tensor.shape)
            raise ValueError(
                f"its value has shape {shape}; at most {MOST_NUMBERS} numbers are logged one by one"
            )
        parts = [named_numbers(f"{name}/{i}", item) for i, item in enumerate(tensor)]
    numbers = {key: number for part in parts for key, number in part.items()}
    if len(numbers) > MOST_NUMBERS:
        raise ValueError(f"its value has {len(numbers)} numbers; at most {MOST_NUMBERS} are logged")
    return numbers


def try_metric(key: str, target: str, metric: nn.Module, vocab_size: int) -> None:
    """Evaluate a copy of the metric once on a made-up batch; its state and all generators stay.

    Raises: ConfigError where its value cannot be logged, or a metric of torchmetrics fails. A
        metric of the user's that fails may need real data: that is a warning.
    """
    rng, drawn = capture(), torch.Generator().manual_seed(0)
    logits = torch.randn(N_POSITIONS, vocab_size, generator=drawn)  # (N, V)
    targets = torch.randint(vocab_size, (N_POSITIONS,), generator=drawn)  # (N,)
    hint = "a metric with one value (average: macro), or a callback that logs what you need"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial: Any = copy.deepcopy(metric)
            trial.update(logits, targets)
            value = trial.compute()
    except Exception as error:
        message = (
            f"fails on logits ({N_POSITIONS}, {vocab_size}) and targets ({N_POSITIONS},): "
            f"{type(error).__name__}: {first_line(error)}"
        )
        if target.startswith("torchmetrics."):
            raise ConfigError.of(key, target, message) from error
        log.warning("%s", ConfigIssue(key, target, message, code=DONE).line)
        return
    finally:
        restore(rng)
    try:
        named_numbers("", value)
    except ValueError as error:
        raise ConfigError.of(key, target, str(error), hint=hint) from error
