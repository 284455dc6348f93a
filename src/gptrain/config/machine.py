"""Checks of the launcher, the run folder, the classes and the devices of a run on this machine."""

import glob
import inspect
import json
import logging
import os
import typing
from collections.abc import Iterator
from typing import Any

from hydra.utils import get_class, get_method
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from gptrain.config.rules import problem
from gptrain.core.data_schema import DATA, MixtureConfig, TextConfig, TokensConfig
from gptrain.core.errors import (
    BAD_DATA,
    FOLDER_UNUSABLE,
    INPUT_NOT_FOUND,
    ConfigIssue,
    first_line,
    show,
)
from gptrain.core.locations import expand_home
from gptrain.core.precision import find_precision
from gptrain.core.schema import (
    SHIPPED,
    LightningTrainerConfig,
    ModelConfig,
    ModuleConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    TrainerConfig,
)
from gptrain.core.small_files import walk
from gptrain.core.value_types import check_target
from gptrain.runtime.process import count_devices, count_nodes, listed_numbers, this_process

DATA_FILES = ("path", "train_path", "val_path", "tokenizer")
NO_FILES = {"ckpt_path": ("last", "best"), "tokenizer": ("bytes", "bpe")}
LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "gptrain")
# Base class of the objects of each group, and the keys that a class gets only if it has them in its
# signature, because gptrain reads them.
GROUPS: dict[str, tuple[str, typing.Iterable[str]]] = {
    "model": ("torch.nn.Module", ModelConfig.OWN_KEYS),
    "module": ("lightning.pytorch.LightningModule", ModuleConfig.OWN_KEYS),
    "optimizer": ("torch.optim.Optimizer", OptimizerConfig.model_fields),
    "scheduler": ("torch.optim.lr_scheduler.LRScheduler", SchedulerConfig.model_fields),
    "trainer": ("lightning.pytorch.Trainer", TrainerConfig.OWN_KEYS),
    "data": ("lightning.pytorch.LightningDataModule", ()),
    "callbacks": ("lightning.pytorch.Callback", ()),
    "logger": ("lightning.pytorch.loggers.Logger", ()),
    "profiler": ("lightning.pytorch.profilers.Profiler", ()),
}


def check_launcher(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the ranks of the config are not those of the launcher.

    Raises:
        ConfigError: If the environment variables of the launcher contradict each other.
    """
    process, trainer = this_process(), run.trainer
    n_nodes, n_local = count_nodes(trainer.num_nodes), count_devices(trainer.devices)
    if not process.is_rank:
        if n_nodes > 1:
            message = "without a launcher, ranks start on this machine only"
            hint = f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun, or mpirun"
            yield problem(run, "trainer.num_nodes", message, hint)
        return
    n_per_node = process.world_size // process.n_nodes
    hint = f"trainer.devices={n_per_node} trainer.num_nodes={process.n_nodes}"
    if (n_local or n_per_node) * n_nodes != process.world_size:
        message = f"the launcher has started {process.world_size} ranks"
        yield problem(run, "trainer.devices", message, hint)
    elif process.n_nodes != n_nodes:
        message = f"the launcher has started ranks on {process.n_nodes} nodes"
        yield problem(run, "trainer.num_nodes", message, hint)


def check_folder(run: RunConfig, name: str) -> Iterator[ConfigIssue]:
    """Yield a problem if the run folder cannot be written, or holds a finished run.

    Args:
        run: Typed config. A training that does not resume needs a folder without a finished run.
        name: Path of the run folder.
    """
    folder = expand_home(name).absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    message, hint = "", "run_dir=<folder>"
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        message = f"{parent} is no folder that you can write to"
    elif run.task == "fit" and not run.ckpt_path and (folder / "result.json").exists():
        message, hint = "already holds a finished run", "ckpt_path=last, or another run_dir"
    if message:
        yield ConfigIssue("run_dir", name, message, hint=hint, code=FOLDER_UNUSABLE)


def check_files(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each data file and checkpoint of the config that is missing or empty.

    Of data, only groups that ship with gptrain are checked. A pattern must match a file. The
    protocol of a mirror must be known.
    """
    if mirror := run.checkpoint.mirror:
        from fsspec import get_filesystem_class  # imported late, because it takes 0.2 s
        from fsspec.core import split_protocol

        try:
            get_filesystem_class(split_protocol(mirror)[0])
        except (ValueError, ImportError) as error:  # the message names the package to install
            yield problem(run, "checkpoint.mirror", first_line(error))
    named: dict[str, Any] = {"ckpt_path": run.ckpt_path, "init_from": run.init_from}
    groups: dict[str, Any] = {"data": run.data}
    if isinstance(run.data, MixtureConfig):
        groups |= {f"data.parts.{name}": part for name, part in run.data.parts.items()}
    for group, section in groups.items():
        if isinstance(section, TextConfig | TokensConfig):
            given = section.plain()
            named |= {f"{group}.{name}": given.get(name) for name in DATA_FILES}
    for key, paths in named.items():
        for path in paths if isinstance(paths, list) else filter(None, [paths]):
            if path in NO_FILES.get(key.rpartition(".")[2], ()):
                continue
            found = glob.glob(full := os.path.expanduser(path), recursive=True)
            if not found and not os.path.exists(full):
                yield ConfigIssue(key, path, "no such file or folder", code=INPUT_NOT_FOUND)
            elif os.path.exists(full) and not os.path.isdir(full) and not os.path.getsize(full):
                yield ConfigIssue(key, path, "empty", code=BAD_DATA)


def check_classes(values: dict[str, Any]) -> Iterator[ConfigIssue]:
    """Yield a problem for each `_target_` that cannot be used in its group with its keys.

    Imports the modules of the classes. A function of the user fits every group, because its return
    type is unknown. Missing arguments are reported when the object is built.

    Args:
        values: Config as nested dicts.
    """
    # get_method logs every exception that it raises; the problem below has its message.
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
    for place, node in walk(values):
        target = node.get("_target_") if isinstance(node, dict) else None
        section = SHIPPED.get(str(target))
        if target is None or target in DATA:
            continue
        if section and node.keys() <= {*section.model_fields, "_target_"}:
            continue  # the schema has checked them
        key = f"{place}._target_"
        try:
            made = get_method(check_target(str(target)))
        except Exception as error:  # the import of a user's module may raise anything
            yield ConfigIssue(key, target, first_line(error))
            continue
        base, computed = GROUPS.get(place) or GROUPS.get(place.rpartition(".")[0], ("", ()))
        is_part = place in GROUPS or place.rpartition(".")[0] in ("callbacks", "logger")
        if is_part and not is_fitting(made, base, place):
            yield ConfigIssue(key, target, f"not of type {base}, which the group needs")
        else:
            yield from _check_arguments(made, place, node, set(computed) if is_part else set())


def is_fitting(made: Any, base: str, group: str) -> bool:
    """Return whether a class or a function can build an object of a group.

    Args:
        made: Object that a `_target_` names.
        base: Name of the base class of the group.
        group: Name of the group. Only a scheduler may be made by a function of torch.
    """
    if inspect.isfunction(made):
        return group == "scheduler" or made.__module__.split(".")[0] not in LIBRARIES
    owner = made.__self__ if inspect.ismethod(made) else made
    return inspect.isclass(owner) and issubclass(owner, get_class(base))


def _check_arguments(
    made: Any, place: str, node: dict[str, Any], computed: set[str]
) -> Iterator[ConfigIssue]:
    """Yield a problem for arguments that a class or a function does not take.

    The values of a user's class are judged by its annotations. A value is never converted, because
    the class gets it as it stands in the config.

    Args:
        made: Class or function.
        place: Dotted key of its node.
        node: Node with its arguments.
        computed: Keys whose values gptrain reads or computes.
    """
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    try:
        signature = inspect.signature(made)
    except (ValueError, TypeError):  # written in C
        return
    if place == "optimizer" and hasattr(made, "parameter_groups"):
        computed |= {*inspect.signature(made.parameter_groups).parameters}
    unused = computed - signature.parameters.keys()
    try:
        signature.bind_partial(**{k: v for k, v in arguments.items() if k not in unused})
    except TypeError as error:
        allowed = ", ".join(signature.parameters)
        yield ConfigIssue(f"{place}._target_", node["_target_"], str(error), allowed)
        return
    if made.__module__.split(".")[0] in LIBRARIES:
        return  # it checks its own arguments
    try:
        types = typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    except Exception:  # an annotation names something that only a type checker imports
        return
    config = ConfigDict(arbitrary_types_allowed=True, strict=True)
    for key in types.keys() & arguments.keys() - computed:
        text = json.dumps(arguments[key], default=str)
        if "_target_" in text:
            continue  # the value of a nested node is made later
        try:
            TypeAdapter(types[key], config=config).validate_json(text)
        except PydanticUserError:
            continue  # a type that pydantic does not know, or one with a config of its own
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should be", "must be")
            yield ConfigIssue(f"{place}.{key}", show(arguments[key]), message)


def check_devices(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if this machine lacks the accelerator or its devices. Imports torch."""
    from torch.cuda import device_count
    from torch.distributed import is_backend_available

    from gptrain.runtime.devices import accelerator_of

    devices, backend = run.trainer.devices, run.strategy.backend
    kind = accelerator_of(run.trainer.accelerator)
    if kind is None:
        yield problem(run, "trainer.accelerator", "not on this machine", "trainer=cpu")
    has_scaler = kind != "cpu" or not isinstance(run.trainer, LightningTrainerConfig)
    if find_precision(run.trainer.precision).is_fp16 and not has_scaler:
        hint = "trainer.precision=bf16-mixed"
        yield problem(run, "trainer.precision", "not supported on CPU", hint)
    if backend and not is_backend_available(backend):
        yield problem(run, "strategy.backend", "the installed torch was built without it")
    highest = max(listed_numbers(devices) or range(count_devices(devices) or 0), default=0)
    n_visible = device_count() if kind == "cuda" else highest + 1
    # A launcher may show each rank only its own GPU.
    if highest >= n_visible and not (this_process().is_rank and n_visible == 1):
        variable = os.environ.get("CUDA_VISIBLE_DEVICES", "is not set")
        message = f"{n_visible} visible (CUDA_VISIBLE_DEVICES {variable})"
        yield problem(run, "trainer.devices", message, f"trainer.devices={n_visible}")
