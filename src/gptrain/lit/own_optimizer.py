"""Facts about an optimizer that the user's module builds in its own configure_optimizers."""

import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch

from gptrain.lit.module import LanguageModel

log = logging.getLogger(__name__)


def has_own_optimizer(module: pl.LightningModule) -> bool:
    """Return whether a module builds its optimizer itself, in its own configure_optimizers.

    This is so for every plain LightningModule, and for a subclass of LanguageModel that overrides
    configure_optimizers. The config group `optimizer` then has an effect only if this method of the
    module calls `make_optimizer`.

    Args:
        module: LightningModule of the run.
    """
    return type(module).configure_optimizers is not LanguageModel.configure_optimizers


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the class and the learning rates of an optimizer that the user's module has built.

    The text is printed at the start of a run. It shows the learning rates of the parameter groups
    before any schedule changed them, each distinct value once.

    Args:
        optimizer: Optimizer that the module's configure_optimizers has built.
    """
    rates = (group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups)
    shown = ", ".join(dict.fromkeys(f"{float(rate):g}" for rate in rates if rate is not None))
    return f"{type(optimizer).__name__} · lr {shown} · from the module's configure_optimizers"


def warn_about_ignored_options(module: pl.LightningModule, typed: Mapping[str, Any]) -> None:
    """Log a warning that names the overrides which the module's own configure_optimizers ignores.

    An override such as `optimizer.lr=1e-4` has no effect if this method does not call
    `make_optimizer`. Logs nothing if the module has used the groups of all overrides.

    Args:
        module: Module whose configure_optimizers has been called.
        typed: Key -> value of the overrides that the user typed for the config groups `optimizer`
            and `scheduler`.
    """
    groups_read = module.groups_read if isinstance(module, LanguageModel) else set()
    ignored = {key: value for key, value in typed.items() if key.split(".")[0] not in groups_read}
    if ignored:
        words = ", ".join(f"{key}={value}" for key, value in ignored.items())
        groups = " and the ".join(dict.fromkeys(key.split(".")[0] for key in ignored))
        reason = f"{type(module).__name__}.configure_optimizers does not use the {groups} group"
        log.warning("warning: %s: no effect; %s", words, reason)
