"""Check that each `_target_` of a config can be imported, fits its group and takes its keys."""

import inspect
import json
import logging
import re
import typing
from collections.abc import Iterator
from typing import Any

from hydra.utils import get_class, get_method
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from gptrain.config.check import CheckedConfig
from gptrain.core.data_schema import DATA
from gptrain.core.errors import ConfigIssue, first_line, show
from gptrain.core.schema import (
    SHIPPED,
    ModelConfig,
    ModuleConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainerConfig,
)
from gptrain.core.small_files import walk
from gptrain.core.value_types import check_target

# Keys of Hydra that any node with a _target_ may have.
HYDRA_KEYS = {"_args_", "_recursive_", "_convert_", "_partial_"}
DATASET = r"data\.(parts\.[^.]+\.)?(train|val|test)"  # dotted keys of datasets
# Number of positional arguments that gptrain passes to the `_target_` in addition to the keys.
POSITIONAL = {"optimizer": 1, "scheduler": 1, "module": 0}
# Keys that gptrain reads, and that the `_target_` gets only if its signature has them.
GPTRAIN_KEYS = {
    "model": ModelConfig.OWN_KEYS,
    "module": ModuleConfig.OWN_KEYS,
    "optimizer": OptimizerConfig.model_fields.keys(),
    "scheduler": SchedulerConfig.model_fields.keys(),
    "trainer": TrainerConfig.OWN_KEYS,
}

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
# Base class of the objects of each group. A class in the data group needs no base class.
BASE_CLASSES = {
    "model": "torch.nn.Module",
    "module": "lightning.pytorch.LightningModule",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "data._target_": "lightning.pytorch.LightningDataModule",
    "trainer": "lightning.pytorch.Trainer",
    "callbacks": "lightning.pytorch.Callback",
    "logger": "lightning.pytorch.loggers.Logger",
    "profiler": "lightning.pytorch.profilers.Profiler",
}


def check_classes(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each `_target_` that cannot be used in its group with its keys.

    Each class or function is imported, except those of gptrain all of whose keys the schema checks.
    It must take the keys of its node as keyword arguments. The class that a group itself names must
    also fit the group: it is a subclass of the group's base class, or for `data` a dataset. A
    function of the user fits every group, because its return type is unknown. Hydra's own log
    messages about failed imports are turned off for the rest of the process.

    Args:
        checked: Config without errors.
    """
    # get_method logs every exception that it raises; the issue below reports the exception itself.
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
    for place, node in walk(checked.values):
        if not isinstance(node, dict) or "_target_" not in node:
            continue
        target = node["_target_"]
        section = SHIPPED.get(target)
        arguments = {k: v for k, v in node.items() if k not in HYDRA_KEYS and k != "_target_"}
        if target in DATA:
            continue
        if section is not None and arguments.keys() <= section.model_fields.keys():
            continue
        try:
            target_object = get_method(check_target(str(target)))
        except Exception as error:  # the import of a user's module may raise anything
            yield ConfigIssue(f"{place}._target_", target, first_line(error))
            continue
        group, *below = place.split(".")
        depth = 1 if group in ("callbacks", "logger") else 0
        is_part = bool(re.fullmatch(DATASET, place)) if group == "data" else len(below) == depth
        if place == "data":
            group = "data._target_"
            is_part = True
        if message := type_mismatch(target_object, group) if is_part else "":
            yield ConfigIssue(f"{place}._target_", target, message)
        else:
            yield from _check_arguments(target_object, place, arguments, node)
            yield from _check_types(target_object, place, arguments)


def _check_arguments(
    target_object: Any, place: str, arguments: dict[str, Any], node: dict[str, Any]
) -> Iterator[ConfigIssue]:
    """Yield a problem if keyword arguments do not fit the signature of a class or function.

    Yields nothing if the object has no signature, because it is written in C.

    Args:
        target_object: Class or function that `_target_` names.
        place: Dotted key of the node.
        arguments: Keys of the node, without those of Hydra.
        node: The complete node.
    """
    try:
        signature = inspect.signature(target_object)
    except (ValueError, TypeError):
        return
    group_options = _group_options(target_object) if place == "optimizer" else []
    unused = {*GPTRAIN_KEYS.get(place, ()), *group_options} - signature.parameters.keys()
    arguments = {key: value for key, value in arguments.items() if key not in unused}
    is_complete = place not in POSITIONAL and not node.get("_partial_") and not node.get("_args_")
    try:
        bind = signature.bind if is_complete else signature.bind_partial
        bind(*[None] * POSITIONAL.get(place, 0), **arguments)
    except TypeError as error:
        target = node["_target_"]
        hint = ""
        if place in BASE_CLASSES and target not in SHIPPED:
            # The override `<group>._target_=` keeps the keys of the class that it replaces.
            hint = f"{place}=mine, with a file conf/{place}/mine.yaml that has only its keys"
        allowed = ", ".join((*signature.parameters, *group_options))
        yield ConfigIssue(f"{place}._target_", target, str(error), allowed, hint)


def _check_types(
    target_object: Any, place: str, arguments: dict[str, Any]
) -> Iterator[ConfigIssue]:
    """Yield a problem for each argument of a user's class that does not fit its annotation.

    A value is never converted, because the class gets it as it stands in the config.

    Args:
        target_object: Class or function that `_target_` names.
        place: Dotted key of the node.
        arguments: Keys of the node, without those of Hydra.
    """
    is_class = inspect.isclass(target_object)
    function = getattr(target_object, "__init__", None) if is_class else target_object
    module = str(getattr(target_object, "__module__", ""))
    if module.split(".")[0] in ("gptrain", "transformers", *LIBRARIES):
        return  # the schema or the library checks its own arguments
    try:
        types = typing.get_type_hints(function)
    except Exception:  # an annotation names something that only a type checker imports
        return
    known = GPTRAIN_KEYS.get(place, ())  # gptrain computes their values
    for key in (types.keys() & arguments.keys()) - set(known):
        text = json.dumps(arguments[key], default=str)
        if "_target_" in text:
            continue  # the value of a nested node is made later
        try:
            config = ConfigDict(arbitrary_types_allowed=True, strict=True)
            TypeAdapter(types[key], config=config).validate_json(text)
        except PydanticUserError:
            continue  # a type that pydantic does not know, or one with a config of its own
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should be", "must be")
            yield ConfigIssue(f"{place}.{key}", show(arguments[key]), message)


def _group_options(optimizer_class: Any) -> list[str]:
    """Return the options that an optimizer class uses to make its parameter groups itself.

    They are the arguments of its class method `parameter_groups` after the first three. A class
    without this method has none.

    Raises:
        ValueError: If the method has fewer than three arguments.
    """
    make_groups = getattr(optimizer_class, "parameter_groups", None)
    if make_groups is None:
        return []
    _net, _parameters, _names, *options = inspect.signature(make_groups).parameters
    return options


def type_mismatch(target_object: Any, group: str) -> str:
    """Return why a `_target_` cannot build an object of a group, or an empty string if it can.

    A function of the user is accepted in every group, because its return type is unknown. A
    function of torch or Lightning is accepted as a scheduler only.

    Args:
        target_object: Class, class method or function that the `_target_` names.
        group: `data`, or a key of BASE_CLASSES.
    """
    if inspect.isfunction(target_object):
        is_own = target_object.__module__.split(".")[0] not in LIBRARIES
        if is_own or group == "scheduler":
            return ""
    owner = target_object.__self__ if inspect.ismethod(target_object) else target_object
    base = get_class(BASE_CLASSES["data._target_" if group == "data" else group])
    fits = inspect.isclass(owner) and issubclass(owner, base)
    if group != "data":
        return "" if fits else f"not of type {base.__name__}, which the {group} group needs"
    if fits:
        needed = "needed: a torch.utils.data.Dataset or IterableDataset"
        return f"a LightningDataModule, which is data._target_; {needed}"
    is_dataset = inspect.isclass(owner) and hasattr(owner, "__getitem__")
    return "" if is_dataset else "not of type dataset, which the data group needs"
