"""cfg -> (module, datamodule, trainer): the only place that instantiates a `_target_`."""

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
from hydra.utils import get_method
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from omegaconf import DictConfig, OmegaConf
from torch import nn

from gptrain.config.machine import (
    Machine,
    find_machine,
    native_precision,
    set_threads,
    share_cores,
)
from gptrain.config.problems import ConfigError, Problem
from gptrain.config.process import this_process
from gptrain.lit import LanguageModel, TextDataModule
from gptrain.lit.callbacks import (
    Checkpoints,
    CollectGarbage,
    Curves,
    Guarded,
    ProgressBar,
    StepLog,
    Stragglers,
)
from gptrain.lit.checkpoint_io import StoreIO
from gptrain.lit.environment import Ranks
from gptrain.lit.noise import quiet
from gptrain.lit.report import Report
from gptrain.lit.strategies import spread_net
from gptrain.lit.trainer import NoProfiler, leave_signals_to_us, trim_step
from gptrain.parallel.activation import compiles_loss
from gptrain.parallel.group import after_rank_0, from_rank_0, start_group
from gptrain.parallel.unfit import Unfit
from gptrain.plan import Degrees, degrees
from gptrain.recipe import (
    Lengths,
    build_datasets,
    build_net,
    build_optimizer,
    build_schedule,
    build_target,
    bytes_of_tokens,
    check_vocabulary,
    first_batches,
    peak_lr,
    plan_lengths,
)
from gptrain.resilience.guard import Guard
from gptrain.resilience.lock import read_holder
from gptrain.resilience.store import CheckpointStore
from gptrain.resume import check_data, identity
from gptrain.weights import start_from

# Arguments of the Trainer that the batch arithmetic has already turned into steps.
TRAINER_KEYS = {
    "accelerator", "devices", "num_nodes", "precision", "max_epochs", "max_steps", "min_epochs",
    "accumulate_grad_batches", "limit_train_batches", "overfit_batches", "val_check_interval",
    "check_val_every_n_epoch",
}  # fmt: skip
SPELT_OUT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
PREPARING_S = 86400.0  # what rank 0 may take to tokenize a corpus
STARTING_S = 600.0  # from there to the first step, on a slow file system
SIZES = ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")  # told at the start

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

    split = degrees(
        cfg.strategy.name,
        machine.world_size,
        cfg.strategy.tensor_parallel_size,
        cfg.strategy.pipeline_parallel_size,
    )
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
    cfg: DictConfig, split: Degrees, machine: Machine, local_rank: int
) -> tuple[nn.Module, Strategy]:
    """The net as this rank holds it, and the strategy that trains it.

    Raises: ConfigError if the net lacks what the strategy needs.
    """
    try:
        return spread_net(
            partial(build_net, cfg),
            cfg.strategy,
            split,
            machine.device(local_rank),
            compile=cfg.model.compile,
            activation_checkpointing=cfg.model.activation_checkpointing,
            precision=resolve_precision(cfg, machine),
        )
    except Unfit as error:
        problem = Problem(error.key, OmegaConf.select(cfg, error.key), str(error))
        raise ConfigError([problem]) from error


def resolve_precision(cfg: DictConfig, machine: Machine) -> str:
    """Lightning's one name of it, "auto" decided."""
    precision = str(cfg.trainer.precision)
    return native_precision(machine) if precision == "auto" else SPELT_OUT.get(precision, precision)


def build_trainer(
    cfg: DictConfig,
    machine: Machine,
    strategy: Strategy,
    lengths: Lengths,
    guard: Guard | None,
    train: torch.utils.data.Dataset,
) -> pl.Trainer:
    """Lightning's Trainer over one long epoch: the run's steps, whatever the passes over the data.

    One epoch leaves one place where a run can be interrupted, the end of a step, and none where
    an epoch's counters and the data's position can disagree after a resume.
    """
    options = OmegaConf.to_container(_without(cfg.trainer, TRAINER_KEYS), resolve=True)
    make = get_method(options.pop("_target_"))
    process, fast = this_process(), bool(cfg.trainer.fast_dev_run)
    loggers = [] if fast else [build_target(node) for node in cfg.logger.values()]
    callbacks = [build_target(node) for node in cfg.callbacks.values() if node]
    trainer = make(
        **options,
        accelerator=machine.accelerator,
        devices=hand_devices(strategy, machine),
        num_nodes=machine.n_nodes,
        precision=resolve_precision(cfg, machine),
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=lengths.batch.accumulate,
        val_check_interval=lengths.validate_every * lengths.batch.accumulate,
        check_val_every_n_epoch=None,
        callbacks=[*callbacks, *build_callbacks(cfg, lengths, guard, train)],
        logger=loggers,
        plugins=[
            StoreIO(),
            Ranks(process.rank, process.local_rank, process.world_size, machine.n_local),
        ],
        profiler=build_target(cfg.profiler) if cfg.profiler else NoProfiler(),
        use_distributed_sampler=False,
        enable_checkpointing=False,
        default_root_dir=cfg.run_dir,
    )
    return leave_signals_to_us(trainer)


def hand_devices(strategy: Strategy, machine: Machine) -> int:
    """Gives the strategy its GPUs; returns what the Trainer is then to be told.

    Left to parse trainer.devices, Lightning counts the GPUs that this process sees, which under a
    launcher are more or fewer than the ranks of the node, and refuses.
    """
    if machine.accelerator != "cuda":
        return machine.n_local
    if isinstance(strategy, ParallelStrategy):
        strategy.parallel_devices = [machine.device(i) for i in range(machine.n_local)]
    return 1


def build_callbacks(
    cfg: DictConfig, lengths: Lengths, guard: Guard | None, train: torch.utils.data.Dataset
) -> list[pl.Callback]:
    """What every run needs, whatever the callbacks group holds."""
    bar = ProgressBar() if cfg.trainer.enable_progress_bar else None
    log = StepLog(cfg.trainer.log_every_n_steps, lengths.batch.global_batch_size, lengths.n_steps)
    keeps = cfg.checkpoint.name != "none" and not cfg.trainer.fast_dev_run and cfg.task == "fit"
    checkpoints = build_checkpoints(cfg, lengths, guard, train) if keeps else None
    compiles = cfg.model.compile != "none"
    guarded = Guarded(guard, checkpoints, compiles) if guard is not None else None
    alone = this_process().world_size == 1
    slow = None if alone else Stragglers(cfg.trainer.log_every_n_steps)
    found = (Curves(), log, bar, checkpoints, guarded, CollectGarbage(), slow)
    return [callback for callback in found if callback is not None]


def build_checkpoints(
    cfg: DictConfig, lengths: Lengths, guard: Guard | None, train: torch.utils.data.Dataset
) -> Checkpoints:
    """The callback that saves; long saves give signs of life."""
    store = CheckpointStore(
        Path(cfg.run_dir) / "checkpoints",
        read_holder(cfg.run_dir)["run_id"],
        progress=guard.heartbeat.beat if guard is not None else None,
    )
    return Checkpoints(
        store,
        identity(cfg, lengths.batch.global_batch_size)
        | {"data": getattr(train, "fingerprint", None)},
        every_n_steps=cfg.checkpoint.every_n_steps,
        keep=cfg.checkpoint.keep,
        monitor=cfg.checkpoint.monitor,
        validate_every=lengths.validate_every,
        n_steps=lengths.n_steps,
        in_background=cfg.checkpoint.background,
    )


def build_report(
    cfg: DictConfig,
    machine: Machine,
    lengths: Lengths,
    trainer: pl.Trainer,
    val: torch.utils.data.Dataset,
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


def _without(node: DictConfig, keys: set[str]) -> DictConfig:
    return OmegaConf.masked_copy(node, [key for key in node if key not in keys])
