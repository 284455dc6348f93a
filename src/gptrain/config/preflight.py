"""What is asked of this machine before a rank starts: launcher, folder, files, devices, classes.

Runs once the config itself is right. torch is imported for what only torch knows.
"""

from __future__ import annotations

import glob
import inspect
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from gptrain.config.check import (
    SIMPLE_GPT,
    Config,
    check_cpu,
    check_world,
    count_devices,
    find_dims,
    find_world_size,
    stages_per_rank,
)
from gptrain.config.schema import GROUPS, KNOWN, OF_HYDRA, Run, targets
from gptrain.config.suggest import nearest
from gptrain.config.trust import KINDS, NotFound, locate, wrong_kind
from gptrain.launch.process import Process, this_process
from gptrain.plan.memory import rank_parameters
from gptrain.plan.shape import GPTShape
from gptrain.problems import DONE, FOLDER_UNUSABLE, INPUT_NOT_FOUND, Problem, show

GIB = 2**30
PROCESSES_PER_CORE = 16  # more take longer for their turn than a collective should wait
SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")
STATES = {"torch.optim.AdamW": 2, "gptrain.optim.Muon": 1}  # per parameter, at least
# Positional arguments that our code gives, and keys that only our code reads.
SUPPLIED = {"optimizer": 1, "scheduler": 1, "module": 3}
OURS = {**{group: set(model.model_fields) for group, model in GROUPS.items()}, "trainer": set(),
        "module": {"loss", "metrics"}}  # fmt: skip


def check_place(run: Config, folder: tuple[str, str] | None) -> None:
    """Launcher, run folder and files, by the standard library alone.

    Args:
        folder: key and name of the folder that the job will write into, where it is known.
    """
    try:
        process = this_process()
    except (ValueError, KeyError) as error:
        run.add(iter([Problem("", None, f"the launcher's environment cannot be read: {error}")]))
        return
    run.add(check_launcher(run, process))
    if folder is not None and process.rank == 0 and process.launcher != "gptrain":
        run.add(check_folder(run, *folder))
    run.add(check_files(run))


def check_machine(run: Config) -> None:
    """Devices, classes and memory; imports torch, starts no CUDA context."""

    def look() -> Iterator[Problem]:
        found = yield from check_devices(run)
        yield from check_classes(run)
        if found and not run.errors:
            yield from check_memory(run, *found)

    run.add(look())


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_launcher(run: Config, process: Process) -> Iterator[Problem]:
    """What the launcher started, against what the config says."""
    n_nodes, n_local = run.get("trainer.num_nodes"), count_devices(run.get("trainer.devices"))
    most = PROCESSES_PER_CORE * count_cores()
    if n_local and n_local > most:
        attempt = f"trainer.devices={count_cores()}"
        yield run.error(
            "trainer.devices",
            f"too many processes for {count_cores()} cores",
            attempt,
            f"up to {most}",
        )
    workers = (run.get("data.num_workers") or 0) * (n_local or 1)
    if workers > most:
        wrong = f"{workers} processes in all, on {count_cores()} cores"
        yield run.error("data.num_workers", wrong, f"data.num_workers={count_cores()}")
    if process.launcher == "none" and n_nodes and n_nodes > 1:
        attempt = f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun"
        yield run.error(
            "trainer.num_nodes", "a single process starts ranks on its own machine only", attempt
        )
    if process.launcher not in ("torchrun", "slurm"):
        return
    each = int(os.environ.get("LOCAL_WORLD_SIZE", process.world_size // (n_nodes or 1)))
    if n_nodes and (n_local or each) * n_nodes != process.world_size:
        name = "WORLD_SIZE" if process.launcher == "torchrun" else "SLURM tasks"
        product = f"{n_local or each} x trainer.num_nodes={n_nodes} = {(n_local or each) * n_nodes}"
        nodes = max(1, process.world_size // max(1, each))
        attempt = f"trainer.devices={each}" + (
            f" trainer.num_nodes={nodes}" if nodes != n_nodes else ""
        )
        yield run.error("trainer.devices", f"{product}, but {name}={process.world_size}", attempt)
    if not 0 <= process.rank < process.world_size:
        yield Problem("", None, f"RANK={process.rank} is not below WORLD_SIZE={process.world_size}")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if process.launcher == "torchrun" and process.world_size > 1 and missing:
        attempt = f"torchrun --nproc_per_node={process.world_size} train.py"
        yield Problem(
            "",
            None,
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            attempt=attempt,
        )
    if (
        process.launcher == "torchrun"
        and n_nodes
        and n_nodes > 1
        and "${run_stamp:}" in str(run.raw["run_dir"])
    ):
        wrong = "each node would name its folder by its own clock"
        yield Problem("run_dir", None, wrong, attempt="run_dir=<a folder that all nodes see>")


def check_folder(run: Config, key: str, name: str) -> Iterator[Problem]:
    """A run folder that can be made, and holds no finished or old run."""
    folder = Path(name).expanduser().absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    old, resumes = run.get("from_run"), run.get("ckpt_path") or run.get("task") != "fit"
    code, reason, attempt = FOLDER_UNUSABLE, "", f"{key}=<folder>"
    if not parent.is_dir():
        reason = (
            "a file, not a folder" if parent == folder else f"cannot write ({parent} is a file)"
        )
    elif not os.access(parent, os.W_OK | os.X_OK):
        reason = f"cannot write (no permission in {parent})"
    elif not resumes and (folder / "result.json").exists():
        reason, attempt = "already holds a finished run", "ckpt_path=last, or another run_dir"
    continues = run.get("task") == "fit" and run.schema is Run
    if old and not continues and Path(old).expanduser().resolve() == folder.resolve():
        reason, code = "the folder of the old run, whose files this one would replace", 2
        attempt = f"no {key}: a folder of its own is made"
    if reason:
        yield Problem(key, name, reason, attempt=attempt, code=code)


def check_files(run: Config) -> Iterator[Problem]:
    """Data, checkpoints and old runs that are named exist; of datasets those that ship."""
    for part in ("data.train", "data.val", "data.test"):
        if not str(run.get(f"{part}._target_")).startswith("gptrain.data."):
            continue
        found = run.get(f"{part}.path") or []
        for path in found if isinstance(found, list) else [found]:
            if not os.path.exists(os.path.expanduser(path)) and not glob.glob(path, recursive=True):
                key = run.source(f"{part}.path")
                attempt = f"{key}=<file or folder>, or data=dummy_text"
                yield Problem(key, path, "no such file or folder", "", attempt, INPUT_NOT_FOUND)
        tokenizer = run.get(f"{part}.tokenizer", "bytes")
        if tokenizer not in ("bytes", "bpe") and not os.path.exists(os.path.expanduser(tokenizer)):
            key, allowed = run.source(f"{part}.tokenizer"), "bytes, bpe, or a tokenizer.json"
            yield Problem(key, tokenizer, "no such file", allowed, f"{key}=bytes", INPUT_NOT_FOUND)
    for key in ("ckpt_path", "init_from", "from_run"):
        path = run.get(key)
        if path in (None, "last", "best") or os.path.exists(os.path.expanduser(path)):
            continue
        newest = _newest_checkpoint(run.get("output_dir"))
        wrong = "no such file or folder" + (f"; newest here: {newest}" if newest else "")
        attempt = "ckpt_path=last" if key == "ckpt_path" else f"{key}=null"
        yield Problem(key, path, wrong, "", attempt, INPUT_NOT_FOUND)


def check_devices(run: Config) -> Generator[Problem, None, tuple[str, int] | None]:
    """The accelerator and as many devices as the run asks for; returns its kind and their number."""
    import torch

    from gptrain.launch.devices import accelerator_of, count_local

    asked, process = run.get("trainer.accelerator"), this_process()
    kind = accelerator_of(asked)
    if kind is None:
        name = {"gpu": "GPU", "cuda": "GPU", "mps": "Apple GPU"}.get(asked, asked.upper())
        yield run.error("trainer.accelerator", f"no {name} on this machine", "trainer=cpu")
        return None
    if kind == "cpu":
        yield from check_cpu(run)
    n_local = count_local(run.get("trainer.devices"), kind, run.get("trainer.num_nodes"))
    if kind == "cuda":
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield from check_visible(run, torch.cuda.device_count(), shown, process.is_rank)
    elif kind == "cpu" and n_local > count_cores():
        yield run.warning("trainer.devices", f"more processes than the {count_cores()} cores here")
    if find_world_size(run) is None:
        world_size = n_local * run.get("trainer.num_nodes")
        if run.get("strategy.name") == "single" and world_size > 1:
            yield run.error(
                "trainer.devices", "more than one device under strategy=single", "strategy=ddp"
            )
        yield from check_world(run, world_size)
    return kind, n_local


def check_visible(
    run: Config, visible: int, shown: str | None, is_rank: bool = False
) -> Iterator[Problem]:
    """As many GPUs as asked for, and of the numbers asked for.

    Args:
        visible: GPUs that this process sees.   shown: CUDA_VISIBLE_DEVICES.
        is_rank: a launcher started it, and may show each rank one GPU, its own, as number 0.
    """
    if is_rank and visible == 1:
        return
    asked = run.get("trainer.devices")
    if isinstance(asked, str) and "," in asked:
        asked = [int(part) for part in asked.split(",") if part]
    wrong = f"only {visible} GPU{'s' if visible != 1 else ''} visible"
    wrong += f" (CUDA_VISIBLE_DEVICES={shown})" if shown is not None else ""
    if isinstance(asked, list) and max(asked) >= visible:
        yield run.error("trainer.devices", wrong, allowed=f"0 .. {visible - 1}")
    elif (count_devices(asked) or 0) > visible:
        yield run.error("trainer.devices", wrong, f"trainer.devices={visible}")


def check_classes(run: Config) -> Iterator[Problem]:
    """Every `_target_` that does not ship: what it is, and the keywords that it is given."""
    for place, node in targets(run.values):
        target, model = node["_target_"], KNOWN.get(node["_target_"])
        given = {key: value for key, value in node.items() if key not in OF_HYDRA}
        if model is not None and given.keys() <= model.model_fields.keys():
            continue
        group = place.split(".")[0]
        is_part = place.count(".") == (group in ("callbacks", "logger", "data"))
        try:
            found = _find(target, group if is_part else "")
        except NotFound as error:
            yield Problem(f"{place}._target_", target, str(error))
            continue
        yield from _check_keywords(found, place, given, node)


def _find(target: str, group: str) -> Any:
    """The class or function that a place may hold. Raises: NotFound."""
    kind = KINDS.get(group, "").rpartition(".")[2]
    if kind and target.split(".")[0] in sys.stdlib_module_names:
        raise NotFound(f"no {kind}, as this place needs")  # without an import
    found = locate(target)
    if not callable(found):
        raise NotFound("neither a class nor a function")
    home = (getattr(found, "__module__", None) or "").split(".")[0]
    theirs = home in sys.stdlib_module_names or home in ("torch", "lightning", "pytorch_lightning")
    if inspect.isfunction(found) and not theirs:  # of a package that makes its objects by functions
        return found
    if group and (reason := wrong_kind(found, group)):
        raise NotFound(reason)
    return found


def _check_keywords(
    found: Any, place: str, given: dict[str, Any], node: dict[str, Any]
) -> Iterator[Problem]:
    """Keywords that a class or function does not take, and those that it needs."""
    try:
        parameters = inspect.signature(found).parameters
    except (ValueError, TypeError):
        return  # written in C, without one
    kinds = inspect.Parameter
    names = [
        p.name
        for p in parameters.values()
        if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    ours, named = OURS.get(place, set()), names[SUPPLIED.get(place, 0) :]
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    for key in sorted(given.keys() - ours - set(named)) if not takes_any else ():
        near = nearest(key, named)
        wrong = f"{found.__qualname__} takes no such argument"
        wrong += f", did you mean {place}.{near}?" if near else ""
        yield Problem(f"{place}.{key}", show(given[key]), wrong, ", ".join(named) or "none")
    if node.get("_partial_") or node.get("_args_") or place in {*SUPPLIED, "trainer"}:
        return
    for name in named:
        if parameters[name].default is kinds.empty and name not in given:
            attempt = f"+{place}.{name}=<value>"
            yield Problem(
                f"{place}.{name}", None, f"{found.__qualname__} needs it", attempt=attempt
            )


def check_memory(run: Config, kind: str, n_local: int) -> Iterator[Problem]:
    """A warning where weights, gradients and optimizer states exceed what a device has."""
    optimizer, precision = run.get("optimizer._target_"), str(run.get("trainer.precision"))
    dims = find_dims(run, find_world_size(run) or n_local * run.get("trainer.num_nodes"))
    if run.get("model._target_") != SIMPLE_GPT or dims is None or optimizer not in STATES:
        return
    name, n_stages = run.get("strategy.name"), stages_per_rank(run)
    shape = GPTShape(*(run.get(f"model.{key}") for key in SIZES))
    ends = {0, dims.pipeline - 1}
    held = max(
        rank_parameters(name, shape, dims, pipeline_rank=end, stages_per_rank=n_stages)
        for end in ends
    )
    each = 2 if precision in ("bf16-true", "16-true") else 4  # bytes of a weight
    trains = run.get("task") == "fit"
    need = held * each * (2 + STATES[optimizer] if trains else 1)
    on_host = kind == "cpu" or run.get("strategy.cpu_offload")
    have = host_bytes() if on_host else device_bytes(n_local)
    if have is None or need * (n_local if on_host else 1) <= have:
        return
    what = "weights, gradients and optimizer states" if trains else "weights"
    where = f"on this machine for {n_local} x that" if on_host else f"per device x {n_local}"
    wrong = f"needs about {need / GIB:.0f} GiB for {what}, {have / GIB:.0f} GiB {where}"
    attempt = "a smaller model" if on_host or "fsdp" in name else "strategy=fsdp or a smaller model"
    yield Problem("model", None, wrong, attempt=attempt, code=DONE)


def host_bytes() -> int | None:
    """Memory of this machine, or what its control group leaves; None where neither is told."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except (OSError, ValueError):
        return None
    return min(found, int(limit)) if limit.isdigit() else found


def device_bytes(n_local: int) -> int | None:
    """Memory of the smallest visible GPU."""
    import torch

    visible = range(min(n_local, torch.cuda.device_count()))
    return min((torch.cuda.get_device_properties(i).total_memory for i in visible), default=None)


def _newest_checkpoint(root: Any) -> Path | None:
    found = Path(str(root)).glob("*/*/checkpoints/step-*/manifest.json")
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest.parent if newest else None
