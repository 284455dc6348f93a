"""What is asked of this machine before a rank starts: launcher, folder, files, devices, classes.

Runs once the config itself is right. torch is imported for what only torch knows.
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
from gptrain.config.values import OF_HYDRA, targets
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
DATASET = r"data\.(parts\.[^.]+\.)?(train|val|test)"  # places of the config that hold one
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # of the ranks, not that of torchrun's agents
WORDS = {"ckpt_path": ("last", "best"), "tokenizer": ("bytes", "bpe")}  # no files
DATA_FILES = ("path", "train_path", "val_path", "tokenizer")
# Place -> arguments that our code gives, by position or name, and keys that only our code reads.
SUPPLIED = {"optimizer": 1, "scheduler": 1, "module": 0}
OURS = {
    "model": ModelConfig.OWN_KEYS,
    "module": ModuleConfig.OWN_KEYS,
    "optimizer": OptimizerConfig.model_fields.keys(),
    "scheduler": SchedulerConfig.model_fields.keys(),
}

LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")
# Group -> base class of its objects; of data what a class can do is looked at.
KINDS = {
    "model": "torch.nn.Module",
    "module": "lightning.pytorch.LightningModule",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "trainer": "lightning.pytorch.Trainer",
    "callbacks": "lightning.pytorch.Callback",
    "logger": "lightning.pytorch.loggers.Logger",
    "profiler": "lightning.pytorch.profilers.Profiler",
}


def check_place(checked: CheckedConfig, folder: str) -> Iterator[ConfigIssue]:
    """Launcher, the folder that the job will write into, files; by the standard library alone."""
    yield from check_launcher(checked)
    if this_process().rank == 0 and not checked.wrong_keys & {"run_dir", "name"}:
        yield from check_folder(checked, folder)
    yield from check_files(checked)


def check_machine(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Devices, classes and memory; imports torch, starts no CUDA context."""
    from torch.cuda import device_count as count_gpus
    from torch.distributed import is_backend_available

    from gptrain.runtime.devices import accelerator_of, count_local

    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it also logs what it raises
    yield from check_classes(checked)
    trainer = checked.run.trainer
    asked, n_nodes = trainer.accelerator, count_nodes(trainer.num_nodes)
    kind = accelerator_of(asked)
    if kind is None:
        name = {"gpu": "GPU", "cuda": "GPU", "mps": "Apple GPU"}.get(asked, asked.upper())
        yield checked.error("trainer.accelerator", f"no {name} on this machine", "trainer=cpu")
        return
    n_local = count_local(checked.run.trainer.devices, kind)
    if kind == "cpu":
        yield from check_cpu(checked)
    if (backend := checked.run.strategy.backend) and not is_backend_available(backend):
        built = ", ".join(filter(is_backend_available, ("nccl", "gloo", "mpi")))
        yield checked.error("strategy.backend", "torch here was built without it", allowed=built)
    if kind == "cuda":
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield from check_visible(checked, count_gpus(), shown, this_process().is_rank)
    world_size = find_world_size(checked.run) or n_local * n_nodes
    yield from check_world(checked, world_size)
    if not checked.errors:
        yield from check_memory(checked, kind, n_local, world_size)


def check_launcher(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """What the launcher started, against what the config says."""
    process, n_nodes = this_process(), count_nodes(checked.run.trainer.num_nodes or 1)
    n_local = count_devices(checked.run.trainer.devices)
    if process.launcher == "none" and n_nodes > 1:
        message = "a single process starts ranks on its own machine only"
        hint = f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun, or mpirun"
        yield checked.error("trainer.num_nodes", message, hint)
    if not process.is_rank:
        return
    each = process.world_size // process.n_nodes
    n_local = n_local or each
    if n_local * n_nodes != process.world_size:
        product = f"{n_local} x trainer.num_nodes={n_nodes} = {n_local * n_nodes}"
        hint = f"trainer.devices={each} trainer.num_nodes={process.n_nodes}"
        message = f"{product}, but {LAUNCHERS[process.launcher][1]}={process.world_size}"
        yield checked.error("trainer.devices", message, hint)
    elif process.n_nodes != n_nodes:
        message, hint = f"{process.launcher} started ranks on {process.n_nodes}", process.n_nodes
        yield checked.error("trainer.num_nodes", message, f"trainer.num_nodes={hint}")
    if n_nodes > 1 and process.launcher in ("openmpi", "mpich") and "MASTER_ADDR" not in os.environ:
        hint = "mpirun -x MASTER_ADDR=<first node> -x MASTER_PORT=29500 ... (MPICH: -genv)"
        yield ConfigIssue("MASTER_ADDR", None, "not set: where the ranks meet", hint=hint)
    if process.launcher != "slurm" and n_nodes > 1 and run_stamp() in (checked.run.run_dir or ""):
        message = "each node would name its folder by its own clock"
        yield checked.error("run_dir", message, "run_dir=<a folder that all nodes see>")
    if process.launcher == "torchrun" and n_nodes > 1 and os.environ.get(OWN_STORE) != "1":
        message = "torchrun cannot start a lost node again (pytorch#135712)"
        yield ConfigIssue(OWN_STORE, "", message, hint=f"{OWN_STORE}=1 torchrun ...", code=DONE)


def check_folder(checked: CheckedConfig, name: str) -> Iterator[ConfigIssue]:
    """A run folder that can be made, or written into, and holds no finished run."""
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
    """Data, checkpoints and old runs that are named exist; of data groups those that ship.

    A command that is no run reads none of a run's data.
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
        from fsspec import get_filesystem_class  # 0.2 s
        from fsspec.core import split_protocol

        try:
            get_filesystem_class(split_protocol(mirror)[0])
        except (ValueError, ImportError) as error:  # which says what to install
            yield checked.error("checkpoint.mirror", first_line(error))
    for key, paths in named.items():
        for path in paths if isinstance(paths, list) else filter(None, [paths]):
            found = os.path.expanduser(path)
            if path in WORDS.get(key.rpartition(".")[2], ()):
                continue
            if os.path.exists(found):
                if not os.path.isdir(found) and not os.path.getsize(found):
                    yield ConfigIssue(key, path, "empty", hint=f"{key}=<file>", code=BAD_DATA)
                continue
            if not (key.startswith("data.") and glob.glob(found, recursive=True)):
                hint = "ckpt_path=last" if key == "ckpt_path" else f"{key}=<file or folder>"
                message, code = "no such file or folder", INPUT_NOT_FOUND
                yield ConfigIssue(key, path, message, hint=hint, code=code)


def check_visible(
    checked: CheckedConfig, visible: int, shown: str | None, is_rank: bool = False
) -> Iterator[ConfigIssue]:
    """As many GPUs as asked for, and of the numbers asked for.

    Args:
        visible: GPUs that this process sees.   shown: CUDA_VISIBLE_DEVICES.
        is_rank: a launcher started it, and may show each rank one GPU, its own, as number 0.
    """
    asked = checked.run.trainer.devices
    numbers = listed_numbers(asked) or range(count_devices(asked) or 0)
    if max(numbers, default=0) < visible or (is_rank and visible == 1):
        return
    message = f"only {visible} GPU{'s' * (visible != 1)} visible"
    message += f" (CUDA_VISIBLE_DEVICES={shown})" if shown is not None else ""
    yield checked.error("trainer.devices", message, f"trainer.devices={visible}")


def check_classes(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Every `_target_` that does not ship: what it is, and the keywords that it is given."""
    for place, node in targets(checked.values):
        target, model = node["_target_"], SHIPPED.get(node["_target_"])
        given = {k: value for k, value in node.items() if k not in OF_HYDRA and k != "_target_"}
        if target in DATA or (model is not None and given.keys() <= model.model_fields.keys()):
            continue
        try:
            found = get_method(target)
        except Exception as error:  # whatever a user's module raises is a line, not a traceback
            yield ConfigIssue(f"{place}._target_", target, first_line(error))
            continue
        group, *below = place.split(".")
        depth = 1 if group in ("callbacks", "logger") else 0
        is_part = bool(re.fullmatch(DATASET, place)) if group == "data" else len(below) == depth
        if message := wrong_kind(found, group) if is_part else "":
            yield ConfigIssue(f"{place}._target_", target, message)
        else:
            yield from _check_keywords(found, place, given, node)


def _check_keywords(
    found: Any, place: str, given: dict[str, Any], node: dict[str, Any]
) -> Iterator[ConfigIssue]:
    """Keywords that a class or function does not take, and those that it needs."""
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return  # written in C, without one
    ours = OURS.get(place, set()) - signature.parameters.keys()
    given = {key: value for key, value in given.items() if key not in ours}
    is_whole = place not in SUPPLIED and not node.get("_partial_") and not node.get("_args_")
    try:
        bind = signature.bind if is_whole else signature.bind_partial
        bind(*[None] * SUPPLIED.get(place, 0), **given)
    except TypeError as error:
        allowed, target = ", ".join(signature.parameters), node["_target_"]
        is_typed = place in KINDS and target not in SHIPPED  # over the keys of another class
        hint = f"{place}=mine, of a conf/{place}/mine.yaml with its own keys" if is_typed else ""
        yield ConfigIssue(f"{place}._target_", target, str(error), allowed, hint)


def check_memory(
    checked: CheckedConfig, kind: str, n_local: int, world_size: int
) -> Iterator[ConfigIssue]:
    """A warning where weights, gradients and optimizer states exceed what a device has."""
    from torch import cuda

    run, work = checked.run, None
    name = strategy_name(run.strategy.name, world_size)
    with suppress(ValueError):  # of sizes that do not divide
        work = find_work(run, run.data.sample_tokens, name, world_size, kind == "cpu")
    if work is None or run.task != "fit":
        return  # of another net the size is not known without making it
    need = max(sum(estimate_states(end).values()) for end in work.ends)
    if kind == "cpu" or run.strategy.keeps_weights_on_cpu:
        need, where = need * n_local, "this machine"
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        where, visible = "a device", range(min(n_local, cuda.device_count()))
        have = min((cuda.get_device_properties(i).total_memory for i in visible), default=need)
    if need > have:
        what = "weights, gradients and optimizer states"
        message = f"needs about {need / GIB:.0f} GiB for {what}, {where} has {have / GIB:.0f} GiB"
        hint = "strategy=fsdp or a smaller model"
        yield ConfigIssue("model", None, message, hint=hint, code=DONE)


def wrong_kind(found: Any, group: str) -> str:
    """Why an object is not what a group holds; empty where it is, or a function that makes it."""
    if inspect.isfunction(found):  # of a library only a schedule: a function of the step
        is_own = found.__module__.split(".")[0] not in LIBRARIES
        if is_own or group == "scheduler":
            return ""
    owner = found.__self__ if inspect.ismethod(found) else found
    if group == "data":
        if message := unindexed(owner):
            return message
        is_one, kind = inspect.isclass(owner) and hasattr(owner, "__getitem__"), "dataset"
    else:
        base = get_class(KINDS[group])
        is_one, kind = inspect.isclass(owner) and issubclass(owner, base), base.__name__
    return "" if is_one else f"no {kind}, as this place needs"


def unindexed(found: Any) -> str:
    """Return why a class of the data group has no samples by index; empty for any other class."""
    needed = "needed: a torch.utils.data.Dataset with __len__ and __getitem__(index)"
    if not inspect.isclass(found):
        return ""
    if issubclass(found, get_class("torch.utils.data.IterableDataset")):
        return f"an IterableDataset, whose samples have no index; {needed}"
    if issubclass(found, get_class("lightning.pytorch.LightningDataModule")):
        return f"a LightningDataModule; {needed}, one for data.train and one for data.val"
    return ""
