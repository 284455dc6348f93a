"""Builds the lines that describe a run at its start."""

import re
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import Dataset

from gptrain.assemble.module import takes_net
from gptrain.assemble.optimizer import peak_lr
from gptrain.assemble.provenance import describe_run
from gptrain.config.from_run import NOT_TAKEN
from gptrain.core import labels
from gptrain.core.lengths import RunLengths
from gptrain.core.schema import RunConfig
from gptrain.core.shell import by_key
from gptrain.lit.lightning import strategy_of
from gptrain.lit.module import LanguageModel
from gptrain.lit.report import Report
from gptrain.runtime.devices import RunDevices

SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")  # shown if the net has them


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

    Args:
        cfg: Configuration of the run.
        devices: Devices of the run.
        lengths: Batch arithmetic and number of steps.
        trainer: Trainer with the strategy of the run.
        train: Training set. It may have a method `describe`.
        module: Module, whose net is counted.
    """
    batch, info, arguments = lengths.batch, strategy_of(trainer).info, cfg.model.arguments
    if takes_net(type(module)):
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
    parts = [f"{batch.batch_size} x {batch.data_parallel_size} ranks"]
    if cfg.task == "fit":
        parts[0] += f" x {batch.accumulate} accumulated = {batch.global_batch_size} "
        is_text = lengths.unit == "tokens"
        parts[0] += f"sequences = {lengths.step_tokens} tokens" if is_text else "samples"
        parts[0] += " per step"
        n_steps = lengths.n_steps
        if n_steps is None:
            parts.append("no end")
        else:
            parts.append(f"{labels.count_text(n_steps, 'step')} by {lengths.limit}")
        makes_own = type(module).configure_optimizers is not LanguageModel.configure_optimizers
        if not makes_own and (lr := peak_lr(cfg, batch)) is not None:
            parts.append(f"lr {lr:g}")
    lines = {
        "model": " · ".join(model),
        "strategy": " · ".join(strategy),
    }
    if cfg.task == "fit" and (describe := getattr(train, "describe", None)):
        lines["data"] = describe((lengths.n_steps or 0) * batch.global_batch_size)
    lines["batch"] = " · ".join(parts)
    facts: dict[str, Any] = describe_run(devices) if trainer.is_global_zero else {"overrides": []}
    options = cfg.plain() | {"typed": typed_options(cfg, facts)}
    lines["run"] = cfg.run_dir
    return Report(lines, options, facts)


def parameters_text(n_parameters: int, n_trained: int) -> str:
    """Return a number of parameters as text, in millions or in full.

    It is in full if some parameters are frozen, or if there are less than 50,000.

    Args:
        n_parameters: Number of all parameters.
        n_trained: Number of those that require a gradient.
    """
    if n_trained < n_parameters:
        return f"{n_trained:,} of {n_parameters:,} parameters are trained"
    is_small = n_parameters < 50_000
    return f"{n_parameters:,} parameters" if is_small else f"{n_parameters / 1e6:.1f} M parameters"


def typed_options(cfg: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides that distinguish this run from others, by key.

    Output paths are left out, and in a sweep the overrides that all jobs share. The value of a
    group is its choice.

    Args:
        cfg: Configuration of the run.
        facts: Facts about the start, with the list `overrides`.
    """
    if not facts["overrides"]:
        return {}
    typed: dict[str, Any] = {}
    shared = HydraConfig.get().job.config.override_dirname.exclude_keys
    for key, text in by_key(facts["overrides"]).items():
        if not {re.split("[./]", key)[0], key} & {*NOT_TAKEN, *shared} and key[0] != "~":
            value = cfg.value_of(key)
            typed[key] = value if isinstance(value, int | float | str) else text
    return typed
