"""Checks of the launcher, the run folder, the classes and the devices of a run on this machine."""

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
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigIssue, first_line, show
from gptrain.core.locations import expand_home
from gptrain.core.precision import find_precision
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import check_target
from gptrain.runtime.process import count_devices, count_nodes, this_process

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "transformers", "gptrain")
BASES = {  # base class of the objects of each group
    "model": "torch.nn.Module",
    "module": "lightning.pytorch.LightningModule",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "trainer": "lightning.pytorch.Trainer",
    "data": "lightning.pytorch.LightningDataModule",
    "callbacks": "lightning.pytorch.Callback",
    "logger": "lightning.pytorch.loggers.Logger",
    "profiler": "lightning.pytorch.profilers.Profiler",
}

STRICT = ConfigDict(arbitrary_types_allowed=True, strict=True)


def check_launcher(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the ranks of the config are not those of the launcher."""
    process, trainer = this_process(), run.trainer
    n_nodes, n_local = count_nodes(trainer.num_nodes), count_devices(trainer.devices)
    n_per_node = process.world_size // process.n_nodes
    if process.is_rank and (n_local or n_per_node) * n_nodes != process.world_size:
        hint = f"trainer.devices={n_per_node} trainer.num_nodes={process.n_nodes}"
        message = f"the launcher has started {process.world_size} ranks"
        yield problem(run, "trainer.devices", message, hint)
    elif process.n_nodes != n_nodes:
        message = f"ranks start on {process.n_nodes} node(s)"
        hint = "" if process.is_rank else "torchrun --nnodes=... train.py on each node, or srun"
        yield problem(run, "trainer.num_nodes", message, hint)


def check_folder(run: RunConfig, folder: str) -> Iterator[ConfigIssue]:
    """Yield a problem for a mirror that no package opens, and for a fit over a finished run."""
    if mirror := run.checkpoint.mirror:
        from fsspec import get_filesystem_class  # imported late, because it takes 0.2 s
        from fsspec.core import split_protocol

        try:
            get_filesystem_class(split_protocol(mirror)[0])
        except (ValueError, ImportError) as error:  # the message names the package to install
            yield problem(run, "checkpoint.mirror", first_line(error))
    if run.task == "fit" and not run.ckpt_path and (expand_home(folder) / "result.json").exists():
        message, hint = "already holds a finished run", "ckpt_path=last, or another run_dir"
        yield ConfigIssue("run_dir", folder, message, hint=hint, code=FOLDER_UNUSABLE)


def check_classes(run: RunConfig, node: Any, place: str = "") -> Iterator[ConfigIssue]:
    """Yield a problem for each `_target_` that cannot be used in its group with its keys.

    A function of the user fits every group. Missing arguments are reported when the object is
    built.
    """
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, dict | list):
            yield from check_classes(run, value, f"{place}.{key}".lstrip("."))
    if isinstance(node, dict) and (target := node.get("_target_")) is not None:
        try:
            yield from _check_class(run, node, place)
        except Exception as error:  # the import of a user's module may raise anything
            yield ConfigIssue(f"{place}._target_", target, first_line(error))


def _check_class(run: RunConfig, node: dict[str, Any], place: str) -> Iterator[ConfigIssue]:
    """Yield a problem for each value that a class refuses. Raise if the class or a key is wrong."""
    # get_method logs every exception that it raises; the problem of the caller has its message.
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
    made: Any = get_method(check_target(str(node["_target_"])))
    is_library = str(made.__module__).split(".")[0] in LIBRARIES
    group, _, name = place.partition(".")
    is_part = place in BASES or (group in ("callbacks", "logger") and "." not in name)
    if is_part and not (inspect.isfunction(made) and (place == "scheduler" or not is_library)):
        kind = getattr(made, "__self__", made)  # a class method makes an object of its class
        if not inspect.isclass(kind) or not issubclass(kind, get_class(BASES[group])):
            raise TypeError(f"not of type {BASES[group]}, which the group needs")
    computed: set[str] = set()  # keys that gptrain reads, or passes only if the class takes them
    if place in ("model", "module", "optimizer", "scheduler", "trainer"):
        computed = set(type(getattr(run, place)).model_fields)
    if place == "optimizer" and hasattr(made, "parameter_groups"):
        computed |= {*inspect.signature(made.parameter_groups).parameters}
    try:
        signature = inspect.signature(made)
    except (ValueError, TypeError):  # written in C
        return
    given = {key: value for key, value in node.items() if not key.startswith("_")}
    unused = computed - signature.parameters.keys()
    try:
        signature.bind_partial(**{k: v for k, v in given.items() if k not in unused})
    except TypeError as error:
        raise TypeError(f"{error}; allowed: {', '.join(signature.parameters)}") from error
    try:
        types = typing.get_type_hints(made.__init__ if inspect.isclass(made) else made)
    except Exception:  # an annotation names something that only a type checker imports
        return
    for key in () if is_library else types.keys() & given.keys() - computed:
        text = json.dumps(given[key], default=str)
        try:
            if "_target_" not in text:  # the value of a nested node is made later
                TypeAdapter(types[key], config=STRICT).validate_json(text)
        except PydanticUserError:
            continue  # a type that pydantic does not know, or one with a config of its own
        except ValidationError as error:
            message = error.errors()[0]["msg"].replace("Input should be", "must be")
            yield ConfigIssue(f"{place}.{key}", show(given[key]), message)


def check_devices(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if this machine lacks the accelerator or its devices. Imports torch."""
    from torch.cuda import device_count

    from gptrain.runtime.devices import accelerator_of

    devices, kind = run.trainer.devices, accelerator_of(run.trainer.accelerator)
    if kind is None:
        yield problem(run, "trainer.accelerator", "not on this machine", "trainer=cpu")
    if find_precision(run.trainer.precision).is_fp16 and kind == "cpu":
        hint = "trainer.precision=bf16-mixed"  # Lightning would take it without an error
        yield problem(run, "trainer.precision", "not supported on CPU", hint)
    numbers = devices if isinstance(devices, list) else range(count_devices(devices) or 1)
    n_visible = device_count()
    is_own = this_process().is_rank and n_visible == 1  # of a launcher that shows one GPU to a rank
    if kind == "cuda" and max(numbers) >= n_visible and not is_own:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES", "is not set")
        message = f"{n_visible} visible (CUDA_VISIBLE_DEVICES {variable})"
        yield problem(run, "trainer.devices", message, f"trainer.devices={n_visible}")
