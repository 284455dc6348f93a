"""Options of callbacks, metrics and schedules that the user changes when a run resumes.

A state_dict often holds options as well as counters: the state of EarlyStopping contains its
patience, and the state of a torch schedule contains its arguments. Loading the state overwrites a
changed option with its old value. `OptionTracker` therefore saves the options that each object had
right after __init__. On resume it compares them with the options of the new objects, and sets an
option again only if the two differ. All other values come from the checkpoint, so that a counter
that has the name of an argument continues.

In this module a *part* is a callback, a metric or a schedule, and an *option* is an argument of its
__init__ that the part keeps in an attribute. A callback may also keep an option in another place,
such as a dict. The option is then replaced where the state of the callback has its name and its old
value.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from copy import deepcopy
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from gptrain.lit.lightning import strategy_of

log = logging.getLogger(__name__)
LARGEST_OPTION_TENSOR = 4096  # number of elements; a larger tensor is data, not an option
Options: TypeAlias = dict[str, dict[str, Any]]  # key of a part -> name of an option -> plain value


class OptionTracker(Callback):
    """Callback that keeps changed options of callbacks, metrics and schedules when a run resumes.

    When Lightning loads the state of such an object, the options in the state replace those that
    were typed. If an option in this run's config differs from the option in the checkpoint, this
    callback sets it again to the value of this run's config, and logs the change on rank 0.

    Args:
        configured: Config key of each callback, such as `callbacks.stop`, -> the callback and its
            config node.

    Attributes:
        options: Key of each callback, metric and schedule -> its options in this run as plain
            values. Every checkpoint contains them.
    """

    def __init__(self, configured: Mapping[str, tuple[Callback, Mapping[str, Any]]]) -> None:
        self.configured = configured
        self.options: Options = {}
        # Key of a part -> the part, its options after __init__, its options in the config.
        self._parts: dict[str, tuple[object, dict[str, Any], Mapping[str, Any]]] = {}
        self._is_resumed = False
        self._loaded: Options = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the options of the callbacks in the config and of the metrics of the module."""
        for key, (callback, node) in self.configured.items():
            self.track(key, callback, node)
        for name, metric in getattr(pl_module, "metrics", nn.ModuleDict()).items():
            self.track(f"module.metrics.{name}", metric)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the options to gptrain's checkpoints, but not to files of Lightning callbacks."""
        if strategy_of(trainer).saves_to_store:
            checkpoint["options"] = self.options

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the options in the checkpoint until Lightning has loaded all states."""
        self._is_resumed = trainer.state.fn == "fit"
        self._loaded = checkpoint.get("options", {})  # a file of Lightning has none

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give callbacks and metrics the options that the config has changed, if the run resumes.

        Lightning has loaded their states, with the old options, before this hook. Rank 0 logs each
        change. In every run the options of the schedules are recorded, whose states Lightning loads
        after this hook.
        """
        for index, scheduled in enumerate(trainer.lr_scheduler_configs):
            key = "scheduler" if index == 0 else f"scheduler.{index}"
            self.track(key, scheduled.scheduler)
        self._apply_and_log(trainer, "callbacks.", "module.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give schedules the options that the config has changed, if the run resumes.

        Lightning has loaded their states, with the old options, before this hook. Rank 0 logs each
        change.
        """
        self._apply_and_log(trainer, "scheduler")

    def _apply_and_log(self, trainer: Trainer, *prefixes: str) -> None:
        """Give some parts the options that the config has changed, if the run resumes.

        A part is a callback, a metric or a schedule. Rank 0 logs each change as a warning.

        Args:
            trainer: Trainer of the run.
            prefixes: Prefixes of the keys of the parts to change, such as `callbacks.`.
        """
        if not self._is_resumed:
            return
        for message in self.apply_changes(self._loaded, prefixes):
            if trainer.is_global_zero:
                log.warning("%s", message)

    def track(self, key: str, part: object, node: Mapping[str, Any] | None = None) -> None:
        """Record the options of a callback, metric or schedule before its state is loaded.

        Args:
            key: Config key of the part, such as `callbacks.stop`.
            part: Callback, metric or schedule.
            node: Config node of the part. None if the part has no node.
        """
        initial = {name: deepcopy(value) for name, value in find_options(part)}
        configured = {
            name: value
            for name, value in (node or {}).items()
            if not name.startswith("_") and is_option(value)
        }
        defaults = argument_defaults(type(part)) if isinstance(part, Callback) else {}
        self._parts[key] = part, initial, configured
        # Some classes change an option in __init__, such as EarlyStopping the sign of min_delta.
        # Such an option is compared and printed with its value in the config.
        options = defaults | initial | configured
        self.options[key] = {name: plain(value) for name, value in options.items()}

    def apply_changes(self, saved: Options, prefixes: tuple[str, ...]) -> Iterator[str]:
        """Give some parts the options that the config has changed, after their states were loaded.

        A part is a callback, a metric or a schedule. This is a generator: each part is changed
        while the caller iterates. A part that is not in the checkpoint stays as it is. A
        ModelCheckpoint whose `save_top_k` has changed also drops surplus entries of its ranking.

        Args:
            saved: Options in the checkpoint.
            prefixes: Prefixes of the keys of the parts to change, such as `callbacks.`.

        Yields:
            One message for each changed option, and for each part that this run no longer has.
        """
        for key in saved:
            if key.startswith(prefixes) and key not in self._parts:
                yield f"resumed without {key}, which the earlier run had"
        for key, (part, initial, configured) in self._parts.items():
            if not key.startswith(prefixes) or key not in saved:
                continue
            before, now = saved[key], self.options[key]
            changed = [name for name in now if name in before and before[name] != now[name]]
            for name in changed:
                is_restored = restore_option(part, name, initial)
                if not is_restored and isinstance(part, Callback):
                    value = configured.get(name, now[name])
                    state = deepcopy(part.state_dict())
                    if replace_option(state, name, before[name], value):
                        part.load_state_dict(state)
            if isinstance(part, ModelCheckpoint) and "save_top_k" in changed:
                shorten_ranking(part)
            # If both `_name` and `name` changed, the message has the value of `name`, which comes
            # later in the list.
            for name, source in {name.lstrip("_"): name for name in changed}.items():
                yield f"resumed with {key}.{name}: {before[source]} before, {now[source]} now"


def restore_option(part: object, name: str, initial: Mapping[str, Any]) -> bool:
    """Set the attributes in which a part keeps an option to copies of their initial values.

    A tensor is copied to the device of the present value.

    Args:
        part: Callback, metric or schedule.
        name: Name of the option. The attributes `name` and `_name` are set, if `initial` has them.
        initial: Name of an attribute -> its value right after __init__.

    Returns:
        Whether `initial` has one of the two attributes.
    """
    attributes = [attribute for attribute in (name, f"_{name}") if attribute in initial]
    for attribute in attributes:
        value = deepcopy(initial[attribute])
        if isinstance(value, Tensor):
            value = value.to(getattr(part, attribute).device)
        setattr(part, attribute, value)
    return bool(attributes)


def replace_option(state: dict[str, Any], name: str, before: Any, now: Any) -> bool:
    """Replace an option in the state of a callback, also in nested dicts.

    This finds an option that a callback does not keep in an attribute.

    Args:
        state: State of the callback, which is changed.
        name: Name of the option. Entries whose name begins with additional underscores also count.
        before: Saved value of the option, as a plain value. An entry with another value is not the
            option, and stays.
        now: New value.

    Returns:
        Whether an entry was replaced.
    """
    is_found = False
    for key, value in state.items():
        if str(key).lstrip("_") == name and plain(value) == before:
            state[key] = now
            is_found = True
        elif isinstance(value, dict):
            is_found |= replace_option(value, name, before, now)
    return is_found


def find_options(part: object) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each attribute in which an object keeps an argument of its __init__.

    For an argument `name` the attributes `name`, `_name` and `names` are tried, and in an nn.Module
    the buffers with these names. Values that cannot be options, such as large tensors and objects,
    are left out.

    Args:
        part: Callback, metric or schedule.
    """
    attributes = dict(getattr(part, "__dict__", {}))
    if isinstance(part, nn.Module):
        attributes |= dict(part.named_buffers(recurse=False))
    for name in argument_names(type(part)):
        for attribute in (name, f"_{name}", f"{name}s"):  # torch keeps min_lr in min_lrs
            if attribute in attributes and is_option(attributes[attribute]):
                yield attribute, attributes[attribute]


def argument_names(part_class: type) -> dict[str, None]:
    """Return the argument names of the __init__ of a class and of its base classes.

    They are the keys of a dict, each once: first those of the class, then those of its bases in the
    order of the MRO. `self` and the names of *args and **kwargs are among them.
    """
    inits = (base.__init__ for base in part_class.__mro__[:-1] if "__init__" in vars(base))
    return {name: None for init in inits for name in inspect.signature(init).parameters}


def argument_defaults(part_class: type) -> dict[str, Any]:
    """Return the defaults of the constructor of a class, by the names of the arguments.

    Arguments without a default, and defaults that cannot be options, are left out.
    """
    parameters = inspect.signature(part_class).parameters.values()
    return {p.name: p.default for p in parameters if is_option(p.default)}


def is_option(value: object) -> bool:
    """Return whether a value can be an option that a user changes.

    Options are numbers, strings, None, durations, relative paths, small tensors, and dicts, lists
    and tuples of these. Absolute paths are no options, because they change when a run folder is
    moved.
    """
    if isinstance(value, (str, Path)):
        return not Path(value).is_absolute()
    if isinstance(value, Tensor):
        return value.numel() <= LARGEST_OPTION_TENSOR
    if isinstance(value, Mapping):
        return all(map(is_option, value)) and all(map(is_option, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_option, value))
    return isinstance(value, (bool, int, float, timedelta, type(None)))


def plain(value: Any) -> Any:
    """Convert an option to plain values, which compare with == and which a checkpoint can contain.

    A tensor becomes a number or a list of numbers, an enum its value, a path or a duration a
    string, and a tuple a list. Any other object is returned unchanged.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Enum):  # Lightning's enums are strings, too
        return plain(value.value)
    for kind in (bool, int, float, str):  # a subclass, such as numpy.float64, is no plain value
        if isinstance(value, kind):
            return kind(value)
    return str(value) if isinstance(value, (timedelta, Path)) else value


def shorten_ranking(callback: ModelCheckpoint) -> None:
    """Remove all but the best `save_top_k` files from a ModelCheckpoint's ranking.

    It is called after another `save_top_k` was set, and does nothing if the ranking is not too
    long or `save_top_k` is negative. The files stay on disk. Lightning removes the worst file only
    if the ranking has exactly `save_top_k` entries, so that a longer ranking would keep growing.

    Args:
        callback: ModelCheckpoint whose ranking is changed.
    """
    ranked = callback.best_k_models
    n_kept = callback.save_top_k
    if n_kept < 0 or len(ranked) <= n_kept:
        return
    order = sorted(ranked, key=lambda path: float(ranked[path]), reverse=callback.mode == "max")
    callback.best_k_models = {path: ranked[path] for path in order[:n_kept]}
    if n_kept:
        worst = order[n_kept - 1]
        callback.kth_best_model_path = worst
        callback.kth_value = ranked[worst]
