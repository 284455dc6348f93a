"""cfg -> (module, datamodule, trainer): the only place that instantiates a `_target_`.

Here: the order in which the parts of a run are made. `trainer`: Lightning's Trainer with all its
callbacks; `report`: what the run says of itself.
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig
from torch import nn

from gptrain.assemble.parts import (
    build_datasets,
    build_net,
    build_optimizer,
    build_schedule,
    bytes_of_tokens,
    check_vocabulary,
    first_batches,
    fits,
    plan_lengths,
)
from gptrain.assemble.report import build_report
from gptrain.assemble.resume import check_data
from gptrain.assemble.trainer import build_trainer, resolve_precision
from gptrain.assemble.weights import start_from
from gptrain.launch.devices import Machine, find_machine, set_threads, share_cores
from gptrain.launch.process import this_process
from gptrain.lit import LanguageModel, TextDataModule
from gptrain.lit.noise import quiet
from gptrain.lit.report import Report
from gptrain.lit.step import trim_step
from gptrain.lit.strategies import spread_net
from gptrain.parallel.activation import compiles_loss
from gptrain.parallel.mesh import after_rank_0, from_rank_0, start_group
from gptrain.plan import ParallelDims, dims_of
from gptrain.resilience.guard import Guard

PREPARING_S = 86400.0  # what rank 0 may take to tokenize a corpus
STARTING_S = 600.0  # from there to the first step, on a slow file system

_built: WeakSet[LanguageModel] = WeakSet()  # by the jobs of this process, and not yet collected


@dataclass
class Run:
    """All parts of one run, in one rank."""

    module: LanguageModel
    datamodule: TextDataModule
    trainer: pl.Trainer
    report: Report
    checkpoint: Path | None  # to go on from, or to evaluate


def build(cfg: DictConfig, guard: Guard | None = None) -> Run:
    """This rank's part of the run that cfg describes; without a guard nothing watches over it."""
    quiet()
    if _built:  # the job before left its net in cycles, which no small collection reaches
        gc.collect()
    process, machine = this_process(), find_machine(cfg)
    if machine.accelerator == "cpu":
        set_threads(machine.n_local)
    if machine.accelerator == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; NVIDIA_TF32_OVERRIDE=0 forbids it
        if machine.n_local > 1 and "OMP_NUM_THREADS" not in os.environ:
            share_cores(machine.n_local)  # an offloaded Adam runs on them
    pl.seed_everything(cfg.seed, verbose=False)

    split = dims_of(cfg.strategy, machine.world_size)
    data_rank = process.rank // split.tensor % split.data
    start_group(
        cfg.strategy.backend or machine.backend,
        machine.device(process.local_rank),
        process.rank,
        machine.world_size,
        cfg.strategy.timeout_s,
    )
    beat = guard.heartbeat.beat if guard is not None else lambda **_: None
    beat(phase="data", allow_s=PREPARING_S)
    with guard.nothing_to_save() if guard is not None else nullcontext():
        train, val, test = after_rank_0(partial(build_datasets, cfg), process.rank, PREPARING_S)
    beat(phase="build", allow_s=STARTING_S)
    if cfg.trainer.overfit_batches:
        train = first_batches(train, cfg.trainer.overfit_batches, cfg.data.batch_size * split.data)
    tokens, targets = train[0]
    check_vocabulary(cfg, tokens, targets)
    lengths = plan_lengths(cfg, len(train), len(tokens), split.data)

    start = from_rank_0(cfg.ckpt_path)  # verified by the one process that holds the run folder
    checkpoint = None if start is None else Path(start)
    check_data(cfg, checkpoint, getattr(train, "fingerprint", None))
    torch.manual_seed(cfg.seed)
    net, strategy = spread(cfg, split, machine, process.local_rank)
    if checkpoint is None and cfg.init_from is not None:
        start_from(cfg, net, getattr(strategy, "pipeline", None))
    torch.manual_seed(cfg.seed + 1 + process.rank)  # dropout differs between ranks

    module = LanguageModel(
        net,
        partial(build_optimizer, cfg, lengths.batch),
        build_schedule(cfg, lengths.n_steps),
        token_bytes=bytes_of_tokens(val),
        on_nonfinite=cfg.on_nonfinite,
        compiles_loss=compiles_loss(cfg.model.compile, machine.accelerator),
    )
    _built.add(module)
    datamodule = TextDataModule(
        train,
        val,
        test,
        batch_size=cfg.data.batch_size,
        accumulate=lengths.batch.accumulate,
        n_steps=lengths.n_steps,
        seed=cfg.seed,
        rank=data_rank,
        world_size=split.data,
        ranks_per_sample=split.tensor,
        num_workers=cfg.data.num_workers,
        pin_memory=machine.accelerator == "cuda",
    )
    trainer = build_trainer(cfg, machine, strategy, lengths, guard, train)
    trim_step(trainer, module)
    report = build_report(cfg, machine, lengths, trainer, val)
    return Run(module, datamodule, trainer, report, checkpoint)


def spread(
    cfg: DictConfig, split: ParallelDims, machine: Machine, local_rank: int
) -> tuple[nn.Module, Strategy]:
    """The net as this rank holds it, and the strategy that trains it.

    Raises: ConfigError if the net lacks what the strategy needs.
    """
    with fits(cfg):
        return spread_net(
            partial(build_net, cfg),
            cfg.strategy,
            split,
            machine.device(local_rank),
            compile=cfg.model.compile,
            activation_checkpointing=cfg.model.activation_checkpointing,
            precision=resolve_precision(cfg, machine),
        )
