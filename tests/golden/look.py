"""A user's callback that writes what it sees of a built run, by public names of other packages."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

TRAINER = """accumulate_grad_batches check_val_every_n_epoch ckpt_path default_root_dir
fast_dev_run gradient_clip_algorithm gradient_clip_val limit_predict_batches limit_test_batches
limit_train_batches limit_val_batches log_dir log_every_n_steps max_epochs max_steps min_epochs
min_steps num_devices num_nodes num_sanity_val_steps overfit_batches precision val_check_interval
world_size"""
LOADER = "batch_size drop_last num_workers persistent_workers pin_memory prefetch_factor timeout"
LOGGER = "name version save_dir log_dir"
SCHEDULE = "frequency interval monitor name reduce_on_plateau strict"
VARIABLES = ("GLOO_", "GOMP_", "NCCL_", "OMP_", "PYTORCH_ALLOC")
SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1]
DDP = "bucket_bytes_cap find_unused_parameters gradient_as_bucket_view static_graph"


def name_of(thing: object) -> str:
    """Return the name of a class: that of gptrain's own without its module."""
    module = type(thing).__module__
    name = type(thing).__qualname__
    return name if module.startswith("gptrain.") else f"{module}.{name}"


def is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, bool | int | float | str)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the public plain values that are not None or False, as torch's defaults are."""
    return {
        key: value
        for key, value in sorted(values.items())
        if is_plain(value) and value is not False and key[0] != "_" and key != "start_time"
    }


def chosen(thing: object, names: str) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names.split()}


def describe_part(part: object) -> dict[str, Any]:
    """Describe a part that the user has chosen by its class."""
    return {"class": name_of(part), **plain(vars(part))}


def describe_process() -> dict[str, Any]:
    """Describe what a run sets in its process: settings of torch, variables, handled signals."""
    group = dist.group.WORLD if dist.is_initialized() else None
    backend = group and group._get_backend(torch.device("cpu"))
    return {
        "anomaly": torch.is_anomaly_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": str(torch.get_default_dtype()),
        "matmul": torch.get_float32_matmul_precision(),
        "seed": torch.initial_seed(),
        "threads": torch.get_num_threads(),
        "group": backend and [backend.name(), backend.options._timeout.total_seconds()],
        "variables": {k: os.environ[k] for k in sorted(os.environ) if k.startswith(VARIABLES)},
        "signals": [s.name for s in SIGNALS if type(signal.getsignal(s)) is not signal.Handlers],
    }


def describe_loader(loader: Any) -> dict[str, Any]:
    """Describe a loader, and its first batch."""
    batch = next(iter(loader))
    tensors = batch if isinstance(batch, list | tuple) else [batch[key] for key in sorted(batch)]
    start = loader.multiprocessing_context and loader.multiprocessing_context.get_start_method()
    return chosen(loader, LOADER) | {
        "seed": loader.generator.initial_seed(),
        "start": start,
        "batches": len(loader),
        "first_batch": [[str(x.dtype), [*x.shape], x.flatten()[:8].tolist()] for x in tensors],
    }


class Look(Callback):
    """Writes a JSON file at the end of a fit."""

    def __init__(self, path: str) -> None:
        self.path, self.rates, self.seen = path, [], {}

    def on_train_start(self, trainer, module):
        names = {id(p): name for name, p in module.named_parameters()}
        of_users = [c for c in trainer.callbacks if "." in name_of(c)]
        self.seen = {
            "trainer": chosen(trainer, TRAINER),
            "process": describe_process(),
            "callbacks": [describe_part(c) for c in of_users if c is not self],
            "loggers": [describe_part(x) | chosen(x, LOGGER) for x in trainer.loggers],
            "schedules": [
                {"class": name_of(config.scheduler), **chosen(config, SCHEDULE)}
                for config in trainer.lr_scheduler_configs
            ],
            "profiler": describe_part(trainer.profiler),
            "ddp": chosen(trainer.model, DDP)
            if isinstance(trainer.model, DistributedDataParallel)
            else None,
            "module": [name_of(module), name_of(module.net)],
            "weights": {n: [str(p.dtype), [*p.shape]] for n, p in module.named_parameters()},
            "dropout": sorted({m.p for m in module.modules() if isinstance(m, torch.nn.Dropout)}),
            "optimizer": [name_of(optimizer) for optimizer in trainer.optimizers],
            "groups": [
                plain({key: value for key, value in group.items() if key != "params"})
                | {"weights": [names.get(id(p), "?") for p in group["params"]]}
                for optimizer in trainer.optimizers
                for group in optimizer.param_groups
            ],
        }

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_end(self, trainer, module):
        self.seen["train_loader"] = describe_loader(trainer.train_dataloader)
        self.seen["val_loader"] = describe_loader(trainer.val_dataloaders)
        self.seen["learning_rates"] = [[float(f"{lr:.6g}") for lr in step] for step in self.rates]
        if trainer.is_global_zero:
            with open(self.path, "w") as file:
                json.dump(self.seen, file)
