"""Check a run, and build it from its config. `build` makes the parts in the order of its lines.

Each part has a file of its own in this package, see its README.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import distributed, nn

from gptrain.assemble import datasets
from gptrain.assemble.companion_files import write_tokenizer
from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.load import build_net, start_from
from gptrain.assemble.module import build_module, build_optimizer, module_class
from gptrain.assemble.resume import check_ranks, continue_run
from gptrain.assemble.trainer import build_trainer
from gptrain.assemble.training_run import TrainingRun
from gptrain.checkpoints.lock import read_run_id
from gptrain.checkpoints.manifest import read_manifest
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError
from gptrain.core.lengths import BatchPlan, plan_batch, plan_lengths
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import parallel_dims, strategy_name
from gptrain.data.samples import has_documents
from gptrain.lit import LanguageModel, TextDataModule
from gptrain.lit.lightning import use_checkpoint
from gptrain.lit.messages import quiet_lightning
from gptrain.lit.strategies import build_strategy
from gptrain.lit.user_data import UserData
from gptrain.parallel.mesh import after_rank_0, from_rank_0, gather, start_group
from gptrain.parallel.placement import build_on_meta_device
from gptrain.parallel.requirements import check_batch, check_fit, check_layout
from gptrain.runtime.devices import RunDevices, find_devices, native_precision, set_threads
from gptrain.runtime.launch import typed_words
from gptrain.runtime.process import Process, this_process
from gptrain.runtime.store import start_store
from gptrain.runtime.watchdog import Guard

# Timeouts in seconds, by phase of the start.
_PREPARING_S = 86400.0  # rank 0 tokenizes a corpus
_SHARED_S = 10.0  # a file written by one node becomes visible on all nodes (NFS takes seconds)
_CONNECTING_S = 60.0  # after the timeout of the process group, ranks report that some are missing
_STARTING_S = 600.0  # the net is built and the first step taken, on a slow file system


def check(cfg: RunConfig) -> None:
    """Check that ranks, batch, net, module and optimizer fit the config, before the run starts.

    The net is built on the meta device if its class allows it, so that it takes no memory. Nothing
    is written. No process group is needed: each process checks by itself.

    Raises:
        ConfigError: If a part does not fit, or the number of ranks does not fit the strategy or the
            batch. Other errors of the user's classes pass unchanged.
    """
    devices = find_devices(cfg)
    with as_config_errors(cfg, "trainer.devices"):
        dims = parallel_dims(cfg.strategy, devices.world_size, devices.n_nodes)
    with as_config_errors(cfg, "data.global_batch_size"):
        check_batch(cfg.strategy, dims, plan_batch(cfg, dims.data))
    with as_config_errors(cfg, "model._target_"):
        module_type = module_class(cfg, dims.world_size)
        net = build_on_meta_device(partial(build_net, cfg.model))
        limit = getattr(net, "max_seq_len", None)  # may be another than the key model.max_seq_len
        if isinstance(limit, int) and (cfg.data.sample_tokens or 0) > limit:
            message, hint = f"longer than the {limit} positions of the net", f"data.seq_len={limit}"
            raise ConfigError.of("data.seq_len", cfg.value_of("data.seq_len"), message, hint=hint)
        check_fit(net, cfg.strategy, dims, _with_compile(cfg, devices, lambda: net).model)
        if cfg.data.masks_documents:
            check_layout(net)
    if cfg.task == "fit" and issubclass(module_type, LanguageModel):
        # Some optimizers need weights with values and raise one of these errors on the meta device.
        # Any other error of these types is then seen at the start. The batch does not matter here.
        with suppress(RuntimeError, AssertionError):
            build_optimizer(cfg, BatchPlan(1, 1, 1), net)


def _with_compile(cfg: RunConfig, devices: RunDevices, net: Callable[[], nn.Module]) -> RunConfig:
    """Return the config, with "none" for a `model.compile` that would not help.

    A value that the user typed is always used. One from a yaml file, as in `trainer=gpu`, becomes
    "none" on a CPU, and "blocks" also for a net without `blocks`.
    """
    mode = cfg.model.compile
    is_typed = any(word.lstrip("+").startswith("model.compile=") for word in typed_words())
    if mode == "none" or is_typed:
        return cfg
    helps = devices.accelerator != "cpu" and (mode == "model" or hasattr(net(), "blocks"))
    return cfg if helps else cfg.changed({"model.compile": "none"})


def build(cfg: RunConfig, guard: Guard) -> TrainingRun:
    """Build this rank's part of a run. All ranks must call it.

    The function joins the process group, prepares the data on rank 0 first, and builds the net with
    its initial weights or those of `init_from`. A checkpoint is loaded later, by the Trainer.
    Before a fit, rank 0 writes the files of the tokenizer to the run folder.

    Args:
        cfg: Configuration of the run, for which `check` has passed. On rank 0, `ckpt_path` is the
            result of `find_checkpoint`. The value on other ranks has no effect.

    Raises:
        ConfigError: If a part does not fit the config, the data or the checkpoint.
        DataError: If the data are empty or damaged.
        TimeoutError: If not all ranks join the process group in time.
        ValueError: If ranks of a launcher have no MASTER_ADDR or MASTER_PORT.
        OSError: If a file cannot be read or written.
        PreemptedError: If this rank is asked to stop while it joins the group or prepares the data.
    """
    process, devices = this_process(), find_devices(cfg)
    dims = parallel_dims(cfg.strategy, devices.world_size, devices.n_nodes)
    module_type = module_class(cfg, devices.world_size)
    guard.beat(phase="connect", allow_s=cfg.strategy.timeout_s + _CONNECTING_S)
    with guard.nothing_to_save():  # a rank that never starts does not delay a request to stop
        _start_rank(cfg, process, devices)
    _check_shared(cfg.run_dir)

    # Rank 0 may tokenize a corpus for hours. There is nothing to save yet.
    guard.beat(phase="data", allow_s=_PREPARING_S)
    with guard.nothing_to_save():
        train, val, test = after_rank_0(partial(datasets.build, cfg), process.rank, _PREPARING_S)
    guard.beat(phase="build", allow_s=_STARTING_S)
    if cfg.task == "fit" and process.rank == 0:
        write_tokenizer(cfg, train)
    datasets.check_samples(cfg, module_type, (train, val, test))
    batch = plan_batch(cfg, dims.data)
    if cfg.trainer.overfit_batches:
        train = datasets.first_batches(train, cfg.trainer.overfit_batches, batch)
    if isinstance(train, UserData):  # the batch size is that of the user's loader
        batch = replace(batch, batch_size=train.batch_size)
    sample = train[0]
    tokens = datasets.find_tokens(sample)
    lengths = plan_lengths(cfg, batch, len(train), None if tokens is None else len(tokens))

    start = from_rank_0(cfg.ckpt_path)  # verified by the process that holds the lock
    checkpoint = None if start is None else Path(start)
    manifest = None if checkpoint is None else read_manifest(checkpoint)
    guard.step = 0 if manifest is None else manifest.step
    if manifest is not None and cfg.task == "fit":
        cfg, lengths = continue_run(cfg, lengths, train, manifest.config)
    # Checkpoints record the resolved precision: "auto" is another one on another device.
    if cfg.trainer.precision == "auto":
        cfg = cfg.changed({"trainer.precision": native_precision(devices)})
    check_ranks(cfg, train, val)
    make_net = partial(build_net, cfg.model)
    cfg = _with_compile(cfg, devices, partial(build_on_meta_device, make_net))

    torch.manual_seed(cfg.seed)  # the initial weights are those of a single process
    with as_config_errors(cfg):
        net, strategy = build_strategy(
            make_net,
            cfg.strategy,
            dims,
            devices.device(process.local_rank),
            compile=cfg.model.compile,
            activation_checkpointing=cfg.model.activation_checkpointing,
            precision=cfg.trainer.precision,
            sample=tokens if issubclass(module_type, LanguageModel) else None,
        )
        if "train" in datasets.read_as_pairs(module_type) and has_documents(sample):
            check_layout(net, len(sample[0]))
        if checkpoint is None and cfg.init_from is not None:
            start_from(cfg, str(cfg.init_from), net, strategy.full_net)
        torch.manual_seed(cfg.seed + 1)  # TrainingMonitor adds the rank once the parts are set up
        module = build_module(cfg, net, lengths, val)
        trainer = build_trainer(cfg, devices, strategy, lengths, guard, train)
    use_checkpoint(trainer, checkpoint)
    if isinstance(train, UserData):
        train.start(lengths)
        datamodule = train.module
        torch.manual_seed(cfg.seed)  # a random split in `setup` is the same on all ranks
    else:
        datamodule = TextDataModule(
            train,
            val,
            test,
            lengths,
            seed=cfg.seed,
            rank=dims.data_rank(process.rank),
            world_size=dims.data,
            equal_lengths=datasets.read_as_pairs(module_type) if lengths.unit == "tokens" else (),
            vocab_size=cfg.model.arguments.get("vocab_size"),
            num_workers=cfg.data.num_workers,
            pin_memory=devices.accelerator == "cuda",
            limits={"val": cfg.trainer.limit_val_batches, "test": cfg.trainer.limit_test_batches},
        )
    return TrainingRun(cfg, lengths, train, module, datamodule, trainer)


def _start_rank(cfg: RunConfig, process: Process, devices: RunDevices) -> None:
    """Prepare torch and Lightning in this process, and join the process group.

    All ranks must call it. No process group is made for the strategy `single`.

    Raises:
        TimeoutError: If not all ranks start in time. For other errors see `start_store`.
    """
    quiet_lightning()
    if devices.accelerator == "cpu" or devices.n_local > 1:  # Adam with cpu_offload uses them, too
        set_threads(devices.n_local)
    if devices.accelerator == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; NVIDIA_TF32_OVERRIDE=0 forbids it
    pl.seed_everything(cfg.seed, verbose=False)
    if strategy_name(cfg.strategy.name, devices.world_size) != "single":
        device = devices.device(process.local_rank)
        start_group(
            cfg.strategy.backend or distributed.get_default_backend_for_device(device),
            device,
            process.rank,
            devices.world_size,
            timeout_s=cfg.strategy.timeout_s,
            store=start_store(),
            is_one_node=devices.n_nodes == 1,
        )


def _check_shared(run_dir: str) -> None:
    """Raise a ConfigError on all ranks if one does not see rank 0's file `run_id`. Collective.

    Waits up to ten seconds, because a network file system shows new files late.
    """
    run_id = from_rank_0(read_run_id(run_dir))
    deadline_s = time.monotonic() + _SHARED_S
    while (is_missing := read_run_id(run_dir) != run_id) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if ranks := [rank for rank, missing in enumerate(gather(is_missing)) if missing]:
        message = f"rank {ranks[0]} does not see the files of rank 0 in this folder"
        hint = "run_dir=<a folder that all nodes share>"
        raise ConfigError.of("run_dir", run_dir, message, hint=hint, code=FOLDER_UNUSABLE)
