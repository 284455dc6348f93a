"""On a resume the options that were typed win; counters come from the checkpoint.

A state_dict often holds options as well as counters: EarlyStopping's has its patience, that of a
torch schedule has all its arguments. Loading it puts the old options over the new ones. Here the
options of each part are kept as they were when the part had just been built. An option of which
this value is another than in the checkpoint's run was changed by the user, and is set again after
the state was loaded. Any other value is left as the checkpoint has it, so that a counter that has
the name of an argument continues.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from gptrain.lit.lightning import strategy_of

log = logging.getLogger(__name__)
LARGEST_TENSOR = 4096  # elements; a larger tensor is data, not an option
Saved: TypeAlias = dict[str, dict[str, Any]]  # key of a part -> option -> plain value


class TypedOptions(Callback):
    """Keeps the options of callbacks, metrics and schedules in checkpoints, and sets changed ones.

    Args:
        typed: Place in the config -> callback, and its node.

    Attributes:
        saved: The options as plain values, for a checkpoint.
    """

    def __init__(self, typed: Mapping[str, tuple[Callback, Mapping[str, Any]]]) -> None:
        self.typed = typed
        self.saved: Saved = {}
        self._parts: dict[str, tuple[object, dict[str, Any], Mapping[str, Any]]] = {}
        self._is_resumed = False
        self._loaded: Saved | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for key, (callback, node) in self.typed.items():
            self.watch(key, callback, node)
        for name, metric in getattr(pl_module, "metrics", nn.ModuleDict()).items():
            self.watch(f"module.metrics.{name}", metric)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if strategy_of(trainer).saves_to_store:
            checkpoint["options"] = self.saved

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._is_resumed = trainer.state.fn == "fit"
        self._loaded = checkpoint.get("options")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set options of callbacks and metrics, which are restored by now; schedules are not."""
        for n, scheduled in enumerate(trainer.lr_scheduler_configs):
            self.watch("scheduler" if n == 0 else f"scheduler.{n}", scheduled.scheduler)
        self._report_changes(trainer, "callbacks.", "module.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report_changes(trainer, "scheduler")

    def _report_changes(self, trainer: Trainer, *groups: str) -> None:
        for line in self.put_back(self._loaded, groups) if self._is_resumed else ():
            if trainer.is_global_zero:
                log.warning("%s", line)

    def watch(self, key: str, part: object, typed: Mapping[str, Any] | None = None) -> None:
        """Keep the options of a part that has just been built.

        Args:
            key: Its place in the config, such as callbacks.stop.
            typed: Its node of the config.
        """
        fresh = {name: deepcopy(value) for name, value in attributes(part)}
        typed = {
            name: value
            for name, value in (typed or {}).items()
            if not name.startswith("_") and is_option(value)
        }
        self._parts[key] = part, fresh, typed
        # An option that __init__ changes, like the sign of EarlyStopping's min_delta, is compared
        # and shown as it was typed.
        self.saved[key] = {name: plain(value) for name, value in (fresh | typed).items()}

    def put_back(self, saved: Saved | None, prefix: tuple[str, ...]) -> Iterator[str]:
        """Set changed options again after states were loaded, and yield one line for each change.

        Args:
            saved: `saved` of the checkpoint's run. None for a checkpoint that is older than this
                file: then every option that stands in the config is set again.
            prefix: Groups whose parts are meant.
        """
        for key, (part, fresh, typed) in self._parts.items():
            if not key.startswith(prefix) or (saved is not None and key not in saved):
                continue
            if saved is None:
                before = {name: plain(value) for name, value in attributes(part)}
                now = {n: plain(fresh[n]) for n in fresh if n.lstrip("_") in typed}
            else:
                before, now = saved[key], self.saved[key]
            changed = [name for name in now if name in before and before[name] != now[name]]
            for name in changed:
                set_again(part, name, fresh)
            if isinstance(part, ModelCheckpoint) and "save_top_k" in changed:
                forget_surplus(part)
            # The name under which an option was typed comes after that of its attribute.
            for name, source in {name.lstrip("_"): name for name in changed}.items():
                yield f"resumed with {key}.{name}: {before[source]} before, {now[source]} now"


def set_again(part: object, name: str, fresh: Mapping[str, Any]) -> None:
    """Set the attributes of an option to the values that they had in the part just built."""
    for attribute in (name, f"_{name}"):
        if attribute in fresh:
            value = deepcopy(fresh[attribute])
            if isinstance(value, Tensor):
                value = value.to(getattr(part, attribute).device)
            setattr(part, attribute, value)


def attributes(part: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that hold arguments of __init__, as far as they are plain values."""
    held = dict(getattr(part, "__dict__", {}))
    if isinstance(part, nn.Module):
        held |= dict(part.named_buffers(recurse=False))
    for name in arguments(type(part)):
        for attribute in (name, f"_{name}", f"{name}s"):  # min_lr is min_lrs in torch
            if attribute in held and is_option(held[attribute]):
                yield attribute, held[attribute]


def arguments(kind: type) -> dict[str, None]:
    """Return the names of the arguments of __init__ of a class and of its base classes."""
    inits = (base.__init__ for base in kind.__mro__[:-1] if "__init__" in vars(base))
    return {name: None for init in inits for name in inspect.signature(init).parameters}


def is_option(value: object) -> bool:
    """Return whether a value can be an option: no function, no large tensor, no place on a disk."""
    if isinstance(value, (str, Path)):
        return not Path(value).is_absolute()
    if isinstance(value, Tensor):
        return value.numel() <= LARGEST_TENSOR
    if isinstance(value, Mapping):
        return all(map(is_option, value)) and all(map(is_option, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_option, value))
    return isinstance(value, (bool, int, float, timedelta, type(None)))


def plain(value: Any) -> Any:
    """Return an option as values that a checkpoint may hold and that can be compared."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return str(value) if isinstance(value, (timedelta, Path)) else value


def forget_surplus(callback: ModelCheckpoint) -> None:
    """Let a ModelCheckpoint rank as many files as it may keep now; their files stay.

    Lightning removes the worst file only while it ranks exactly save_top_k of them.
    """
    ranked, n_kept = callback.best_k_models, callback.save_top_k
    if n_kept < 0 or len(ranked) <= n_kept:
        return
    order = sorted(ranked, key=lambda path: float(ranked[path]), reverse=callback.mode == "max")
    callback.best_k_models = {path: ranked[path] for path in order[:n_kept]}
    if n_kept:
        worst = order[n_kept - 1]
        callback.kth_best_model_path, callback.kth_value = worst, ranked[worst]
