"""What a run says of itself at its start."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from gptrain.assemble.parts import Lengths, peak_lr
from gptrain.launch.devices import Machine
from gptrain.lit.report import Report

SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")  # told at the start


def build_report(
    cfg: DictConfig,
    machine: Machine,
    lengths: Lengths,
    trainer: pl.Trainer,
    val: Dataset,
) -> Report:
    """The run in four lines: model, strategy, batch, folder."""
    batch, told = lengths.batch, trainer.strategy.told
    sizes = [f"{key} {cfg.model[key]}" for key in SIZES if key in cfg.model]
    lr = peak_lr(cfg, batch)
    steps = "no end" if lengths.n_steps is None else f"{lengths.n_steps} steps"
    is_whole = lengths.n_steps is not None and not cfg.trainer.fast_dev_run
    if is_whole and lengths.n_steps < cfg.trainer.max_steps:
        steps += f" (trainer.max_epochs={cfg.trainer.max_epochs} ends it before trainer.max_steps)"
    steps += "" if cfg.max_tokens is None else f" of max_tokens {cfg.max_tokens:g}"
    lines = {
        "model": [told["net_name"], f"{told['n_parameters'] / 1e6:.1f} M parameters", *sizes],
        "strategy": [
            told["name"],
            f"{machine.world_size} x {machine.accelerator}",
            f"precision {trainer.precision}",
            *([f"{torch.get_num_threads()} threads"] if machine.accelerator == "cpu" else []),
            *(["fp32 products in TF32"] if machine.accelerator == "cuda" else []),
        ],
        "batch": [
            f"{batch.batch_size} x {batch.data_parallel_size} ranks x {batch.accumulate} "
            f"accumulated = {batch.global_batch_size} sequences = {lengths.step_tokens} tokens "
            "per step",
            steps,
            *([] if lr is None else [f"lr {lr:g}"]),
        ],
        "run": [cfg.run_dir],
    }
    return Report(
        cfg.run_dir,
        {label: " · ".join(parts) for label, parts in lines.items()},
        lengths.step_tokens,
        OmegaConf.to_container(cfg, resolve=True),
        unigram_entropy=getattr(val, "unigram_entropy", None),
    )
