"""Checks of this machine before a rank starts: launcher, folder, files, classes, devices, memory.

The checks run after the config itself was found valid. `check_paths` does not import torch,
`check_machine` does.
"""

from __future__ import annotations

import glob
import inspect
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.utils import get_class, get_method

from gptrain.config.check import CheckedConfig, check_cpu, check_world, find_world_size
from gptrain.config.values import HYDRA_KEYS, targets
from gptrain.core.data_schema import DATA, DataConfig, MixtureConfig, PartConfig
from gptrain.core.errors import (
    BAD_DATA,
    DONE,
    FOLDER_UNUSABLE,
    INPUT_NOT_FOUND,
    ConfigIssue,
    first_line,
)
from gptrain.core.schema import (
    SHIPPED,
    ModelConfig,
    ModuleConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
)
from gptrain.core.strategies import strategy_name
from gptrain.costs.memory import estimate_states
from gptrain.costs.work import find_work
from gptrain.runtime.process import (
    LAUNCHERS,
    count_devices,
    count_nodes,
    listed_numbers,
    run_stamp,
    this_process,
)

GIB = 2**30
DATASET = r"data\.(parts\.[^.]+\.)?(train|val|test)"  # dotted keys of datasets
# If 1, torchrun gives the ranks a TCP store of their own, apart from the store of its agents.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
NOT_FILES = {"ckpt_path": ("last", "best"), "tokenizer": ("bytes", "bpe")}
DATA_FILES = ("path", "train_path", "val_path", "tokenizer")
# Number of positional arguments that gptrain passes to the `_target_` in addition to the keys.
POSITIONAL = {"optimizer": 1, "scheduler": 1, "module": 0}
# Keys that gptrain reads, and that the `_target_` gets only if its signature has them.
GPTRAIN_KEYS = {
    "model": ModelConfig.OWN_KEYS,
    "module": ModuleConfig.OWN_KEYS,
    "optimizer": OptimizerConfig.model_fields.keys(),
    "scheduler": SchedulerConfig.model_fields.keys(),
}

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
# Base class of the objects of each group. A class in the data group needs no base class.
BASE_CLASSES = {
    "model": "torch.nn.Module",
    "module": "lightning.pytorch.LightningModule",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "trainer": "lightning.pytorch.Trainer",
    "callbacks": "lightning.pytorch.Callback",
    "logger": "lightning.pytorch.loggers.Logger",
    "profiler": "lightning.pytorch.profilers.Profiler",
}


def check_paths(checked: CheckedConfig, folder: str) -> Iterator[ConfigIssue]:
    """Check the launcher, the run folder and the input files, without importing torch.

    Args:
        checked: Config without errors of its own.
        folder: Folder into which the job will write.
    """
    yield from check_launcher(checked)
    if this_process().rank == 0 and not checked.wrong_keys & {"run_dir", "name"}:
        yield from check_folder(checked, folder)
    yield from check_files(checked)


def check_machine(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check classes, devices and memory. Imports torch, but creates no CUDA context."""
    from torch.cuda import device_count as count_gpus
    from torch.distributed import is_backend_available

    from gptrain.runtime.devices import accelerator_of, count_local

    # get_method logs every exception that it raises; check_classes reports the exception itself.
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)
    yield from check_classes(checked)
    trainer = checked.run.trainer
    kind = accelerator_of(trainer.accelerator)
    if kind is None:
        names = {"gpu": "GPU", "cuda": "GPU", "mps": "Apple GPU"}
        name = names.get(trainer.accelerator, trainer.accelerator.upper())
        yield checked.error("trainer.accelerator", f"no {name} on this machine", "trainer=cpu")
        return
    n_local = count_local(trainer.devices, kind)
    if kind == "cpu":
        yield from check_cpu(checked)
    if (backend := checked.run.strategy.backend) and not is_backend_available(backend):
        built = ", ".join(filter(is_backend_available, ("nccl", "gloo", "mpi")))
        message = "the installed torch was built without this backend"
        yield checked.error("strategy.backend", message, allowed=built)
    if kind == "cuda":
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield from check_visible(checked, count_gpus(), variable, this_process().is_rank)
    world_size = find_world_size(checked.run) or n_local * count_nodes(trainer.num_nodes)
    yield from check_world(checked, world_size)
    if not checked.errors:
        yield from check_memory(checked, kind, n_local, world_size)


def check_launcher(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check that devices and nodes of the config match the ranks that a launcher started."""
    process = this_process()
    n_nodes = count_nodes(checked.run.trainer.num_nodes or 1)
    n_local = count_devices(checked.run.trainer.devices)
    if process.launcher == "none" and n_nodes > 1:
        message = "without a launcher, ranks start on this machine only"
        hint = f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun, or mpirun"
        yield checked.error("trainer.num_nodes", message, hint)
    if not process.is_rank:
        return
    n_per_node = process.world_size // process.n_nodes
    n_local = n_local or n_per_node
    if n_local * n_nodes != process.world_size:
        product = f"{n_local} x trainer.num_nodes={n_nodes} = {n_local * n_nodes}"
        hint = f"trainer.devices={n_per_node} trainer.num_nodes={process.n_nodes}"
        message = f"{product}, but {LAUNCHERS[process.launcher][1]}={process.world_size}"
        yield checked.error("trainer.devices", message, hint)
    elif process.n_nodes != n_nodes:
        message = f"{process.launcher} started ranks on {process.n_nodes} nodes"
        yield checked.error("trainer.num_nodes", message, f"trainer.num_nodes={process.n_nodes}")
    if n_nodes > 1 and process.launcher in ("openmpi", "mpich") and "MASTER_ADDR" not in os.environ:
        hint = "mpirun -x MASTER_ADDR=<first node> -x MASTER_PORT=29500 ... (MPICH: -genv)"
        message = "not set; the ranks need the address of the first node"
        yield ConfigIssue("MASTER_ADDR", None, message, hint=hint)
    if process.launcher != "slurm" and n_nodes > 1 and run_stamp() in (checked.run.run_dir or ""):
        message = "each node would name the folder by its own clock"
        yield checked.error("run_dir", message, "run_dir=<a folder that all nodes see>")
    if process.launcher == "torchrun" and n_nodes > 1 and os.environ.get(OWN_STORE) != "1":
        message = "not set; torchrun cannot restart a lost node (pytorch#135712)"
        yield ConfigIssue(OWN_STORE, "", message, hint=f"{OWN_STORE}=1 torchrun ...", code=DONE)


def check_folder(checked: CheckedConfig, name: str) -> Iterator[ConfigIssue]:
    """Check that the run folder can be created or written, and has no finished run.

    Args:
        checked: Config without errors of its own.
        name: Path of the run folder.
    """
    folder = Path(name).expanduser().absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    trains = checked.run.task == "fit" and checked.schema is RunConfig and not checked.run.ckpt_path
    message, hint = "", "run_dir=<folder>"
    if not parent.is_dir():
        message = f"cannot write ({parent} is a file)"
    elif not os.access(parent, os.W_OK | os.X_OK):
        message = f"cannot write (no permission in {parent})"
    elif trains and (folder / "result.json").exists():
        message, hint = "already holds a finished run", "ckpt_path=last, or another run_dir"
    if message:
        yield ConfigIssue("run_dir", name, message, hint=hint, code=FOLDER_UNUSABLE)


def check_files(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check that the data files and checkpoints of the config exist and are not empty.

    Data files are checked for the data groups that ship with gptrain, and only for a training run
    or an evaluation: a command with a schema of its own does not read them. The mirror's URL scheme
    needs an installed fsspec implementation.
    """
    run = checked.run
    groups: dict[str, DataConfig | PartConfig] = {"data": run.data}
    if isinstance(run.data, MixtureConfig):
        groups |= {f"data.parts.{name}": part for name, part in (run.data.parts or {}).items()}
    named = {"ckpt_path": run.ckpt_path, "init_from": run.init_from}
    for group, section in groups.items():
        if checked.schema is RunConfig and section.train.target in DATA:
            given = section.plain()
            named |= {f"{group}.{name}": given.get(name) for name in DATA_FILES}
    if mirror := checked.run.checkpoint.mirror:
        from fsspec import get_filesystem_class  # imported late, because it takes 0.2 s
        from fsspec.core import split_protocol

        try:
            get_filesystem_class(split_protocol(mirror)[0])
        except (ValueError, ImportError) as error:  # the message names the package to install
            yield checked.error("checkpoint.mirror", first_line(error))
    for key, paths in named.items():
        for path in paths if isinstance(paths, list) else filter(None, [paths]):
            full_path = os.path.expanduser(path)
            if path in NOT_FILES.get(key.rpartition(".")[2], ()):
                continue
            if os.path.exists(full_path):
                if not os.path.isdir(full_path) and not os.path.getsize(full_path):
                    yield ConfigIssue(key, path, "empty", hint=f"{key}=<file>", code=BAD_DATA)
                continue
            if not (key.startswith("data.") and glob.glob(full_path, recursive=True)):
                hint = "ckpt_path=last" if key == "ckpt_path" else f"{key}=<file or folder>"
                message = "no such file or folder"
                yield ConfigIssue(key, path, message, hint=hint, code=INPUT_NOT_FOUND)


def check_visible(
    checked: CheckedConfig, n_visible: int, variable: str | None, is_rank: bool = False
) -> Iterator[ConfigIssue]:
    """Check that every GPU index in `trainer.devices` exists.

    Args:
        checked: Config without errors of its own.
        n_visible: Number of GPUs that this process sees.
        variable: Value of CUDA_VISIBLE_DEVICES, or None if it is not set.
        is_rank: Whether a launcher started this process as a rank. A launcher may show each rank
            only its own GPU, as index 0, so a rank may see a single GPU.
    """
    devices = checked.run.trainer.devices
    indices = listed_numbers(devices) or range(count_devices(devices) or 0)
    if max(indices, default=0) < n_visible or (is_rank and n_visible == 1):
        return
    message = f"only {n_visible} GPU{'' if n_visible == 1 else 's'} visible"
    message += f" (CUDA_VISIBLE_DEVICES={variable})" if variable is not None else ""
    yield checked.error("trainer.devices", message, f"trainer.devices={n_visible}")


def check_classes(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Check that each `_target_` can be imported, fits its group, and takes its keyword arguments.

    Classes whose keys are all typed are skipped. Modules of the user are imported.
    """
    for place, node in targets(checked.values):
        target = node["_target_"]
        section = SHIPPED.get(target)
        arguments = {k: v for k, v in node.items() if k not in HYDRA_KEYS and k != "_target_"}
        if target in DATA:
            continue
        if section is not None and arguments.keys() <= section.model_fields.keys():
            continue
        try:
            target_object = get_method(target)
        except Exception as error:  # the import of a user's module may raise anything
            yield ConfigIssue(f"{place}._target_", target, first_line(error))
            continue
        group, *below = place.split(".")
        depth = 1 if group in ("callbacks", "logger") else 0
        is_part = bool(re.fullmatch(DATASET, place)) if group == "data" else len(below) == depth
        if message := type_mismatch(target_object, group) if is_part else "":
            yield ConfigIssue(f"{place}._target_", target, message)
        else:
            yield from _check_arguments(target_object, place, arguments, node)


def _check_arguments(
    target_object: Any, place: str, arguments: dict[str, Any], node: dict[str, Any]
) -> Iterator[ConfigIssue]:
    """Check keyword arguments against the signature of a class or function.

    Does nothing if the object has no signature, because it is written in C.

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
    unused = GPTRAIN_KEYS.get(place, set()) - signature.parameters.keys()
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
            hint = f"{place}=mine, of a conf/{place}/mine.yaml with its own keys"
        allowed = ", ".join(signature.parameters)
        yield ConfigIssue(f"{place}._target_", target, str(error), allowed, hint)


def check_memory(
    checked: CheckedConfig, kind: str, n_local: int, world_size: int
) -> Iterator[ConfigIssue]:
    """Warn if weights, gradients and optimizer states need more memory than a device has.

    Does nothing for a net whose sizes the planner does not know, and for an evaluation.

    Args:
        checked: Config without errors of its own.
        kind: Type of the devices, `cuda`, `mps` or `cpu`.
        n_local: Number of ranks on this machine.
        world_size: Number of ranks of the job.
    """
    from torch import cuda

    run = checked.run
    work = None
    name = strategy_name(run.strategy.name, world_size)
    with suppress(ValueError):  # check_world reports sizes that do not divide
        work = find_work(run, run.data.sample_tokens, name, world_size, kind == "cpu")
    if work is None or run.task != "fit":
        return
    need = max(sum(estimate_states(end).values()) for end in work.ends)
    if kind == "cpu" or run.strategy.keeps_weights_on_cpu:
        where = "this machine"
        need *= n_local
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        where = "a device"
        visible = range(min(n_local, cuda.device_count()))
        have = min((cuda.get_device_properties(i).total_memory for i in visible), default=need)
    if need > have:
        content = "weights, gradients and optimizer states"
        message = f"{content} need about {need / GIB:.0f} GiB, {where} has {have / GIB:.0f} GiB"
        hint = "strategy=fsdp or a smaller model"
        yield ConfigIssue("model", None, message, hint=hint, code=DONE)


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
    if group == "data":
        if message := indexing_problem(owner):
            return message
        kind = "dataset"
        fits = inspect.isclass(owner) and hasattr(owner, "__getitem__")
    else:
        base = get_class(BASE_CLASSES[group])
        kind = base.__name__
        fits = inspect.isclass(owner) and issubclass(owner, base)
    return "" if fits else f"not of type {kind}, which the {group} group needs"


def indexing_problem(owner: Any) -> str:
    """Return why a class cannot be a dataset with samples by index, or an empty string if it can.

    Refused are subclasses of IterableDataset and LightningDataModule. Functions are accepted.

    Args:
        owner: Class that the `_target_` of a dataset names, or a function.
    """
    needed = "needed: a torch.utils.data.Dataset with __len__ and __getitem__(index)"
    if not inspect.isclass(owner):
        return ""
    if issubclass(owner, get_class("torch.utils.data.IterableDataset")):
        return f"an IterableDataset, whose samples have no index; {needed}"
    if issubclass(owner, get_class("lightning.pytorch.LightningDataModule")):
        return f"a LightningDataModule; {needed}, one for data.train and one for data.val"
    return ""
