"""Builds the lines that describe a run at its start, and the provenance in result.json."""

import functools
import os
import platform
import re
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import Dataset

from gptrain.assemble.module import peak_lr
from gptrain.assemble.resume import typed_keys
from gptrain.config.from_run import NOT_TAKEN
from gptrain.core import labels, shell
from gptrain.core.lengths import RunLengths
from gptrain.core.locations import LIBRARY, find_project
from gptrain.core.schema import RunConfig
from gptrain.lit.lightning import strategy_of
from gptrain.lit.module import LanguageModel
from gptrain.lit.report import Report
from gptrain.runtime.devices import RunDevices

SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")  # shown if the net has them
PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "torchmetrics", "numpy")
GIT_S = 3.0  # time limit of git, which may be slow on a network file system


def build_report(
    cfg: RunConfig,
    devices: RunDevices,
    lengths: RunLengths,
    trainer: pl.Trainer,
    train: Dataset,
    module: pl.LightningModule,
) -> Report:
    """Build the report of a run, with the lines that it prints at the start.

    There are up to five lines: the model, the strategy, the data if the dataset describes itself,
    the batch, and the run folder. Only rank 0 reads git.
    """
    batch, info, arguments = lengths.batch, strategy_of(trainer).info, cfg.model.arguments
    if isinstance(getattr(module, "net", None), torch.nn.Module):
        model = [info.net_name, parameters_text(info.n_parameters, info.n_trained)]
        model += [f"{key} {arguments[key]}" for key in SIZES if key in arguments]
    else:
        n_parameters = sum(parameter.numel() for parameter in module.parameters())
        n_trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        model = [type(module).__name__, parameters_text(n_parameters, n_trained)]
    device_text = f"{devices.world_size} x {devices.accelerator}"
    strategy = [info.name, device_text, f"precision {trainer.precision}"]
    if devices.accelerator == "cpu":
        strategy.append(labels.count_text(torch.get_num_threads(), "thread"))
    lines = {"model": " · ".join(model), "strategy": " · ".join(strategy)}
    parts = [f"{batch.batch_size} x {batch.data_parallel_size} ranks"]
    if cfg.task == "fit":
        n_steps = lengths.n_steps
        if describe := getattr(train, "describe", None):
            lines["data"] = describe((n_steps or 0) * batch.global_batch_size)
        is_text = lengths.unit == "tokens"
        unit = f"sequences = {lengths.step_tokens} tokens" if is_text else "samples"
        parts[0] += f" x {batch.accumulate} accumulated = {batch.global_batch_size} {unit} per step"
        end = "no end"
        if n_steps is not None:
            end = f"{labels.count_text(n_steps, 'step')} by {lengths.limit}"
        parts.append(end)
        makes_own = type(module).configure_optimizers is not LanguageModel.configure_optimizers
        if not makes_own and (lr := peak_lr(cfg, batch)) is not None:
            parts.append(f"lr {lr:g}")
    lines |= {"batch": " · ".join(parts), "run": cfg.run_dir}
    facts = describe_run(devices) if trainer.is_global_zero else {}
    return Report(lines, cfg.plain() | {"typed": typed_options(cfg)}, facts)


def parameters_text(n_parameters: int, n_trained: int) -> str:
    """Return a number of parameters as text, with the number of those that are not frozen."""
    if n_trained < n_parameters:
        return f"{n_trained:,} of {n_parameters:,} parameters are trained"
    return f"{n_parameters:,} parameters"


def typed_options(cfg: RunConfig) -> dict[str, Any]:
    """Return the typed overrides that distinguish this run from others, by key.

    Output paths are left out, and in a sweep the overrides that all jobs share. The value of a
    group is its choice.
    """
    typed: dict[str, Any] = {}
    shared = HydraConfig.get().job.config.override_dirname.exclude_keys if typed_keys() else ()
    for key, text in typed_keys().items():
        if not {re.split("[./]", key)[0], key} & {*NOT_TAKEN, *shared} and key[0] != "~":
            value = cfg.value_of(key)
            typed[key] = value if isinstance(value, int | float | str) else text
    return typed


def describe_run(devices: RunDevices) -> dict[str, Any]:
    """Return the provenance of a run that is about to start, for result.json.

    The keys are `command`, `overrides` (those that were typed; empty without Hydra), `git` (result
    of `read_git`), `versions`, `host`, `devices` (such as `8 x NVIDIA H100`) and `threads` (of one
    rank). All values can be written as JSON. Runs git, for a few seconds at most.
    """
    is_hydra_command = HydraConfig.initialized()  # False in tests/tools/bench
    device = f"{devices.accelerator} ({platform.machine()})"
    if devices.accelerator == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "command": shell.command("python", *sys.argv),
        "overrides": list(HydraConfig.get().overrides.task) if is_hydra_command else [],
        "git": read_git(find_project() or LIBRARY),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in PACKAGES},
        "host": socket.gethostname(),
        "devices": f"{devices.world_size} x {device}",
        "threads": torch.get_num_threads(),
    }


@functools.cache  # the code of this process was imported once and does not change
def read_git(folder: Path) -> dict[str, object] | None:
    """Return the commit of the repository around a folder, and whether files differ from it.

    The result is computed once per process. It is None if git or a repository is missing, or if git
    is slow.
    """
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # do not write the index
    try:
        output = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=GIT_S, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return None
    head, *lines = output.splitlines()  # "# branch.oid 0123abcd", more headers, changed files
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"commit": head.removeprefix("# branch.oid "), "dirty": is_dirty}
