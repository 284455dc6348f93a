"""Every key of a run that our code must understand, typed, with its default.

Open groups (model, data, optimizer, scheduler, callbacks, logger, profiler) are plain mappings
with a `_target_`: users add to them. Closed ones (strategy, checkpoint, launcher and the keys of
the run) are dataclasses, so that a typo is an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from gptrain.launch.process import run_stamp

PROJECT = Path(__file__).resolve().parents[3]


@dataclass
class StrategyConfig:
    """How the work is spread over the devices; keys without effect under `name` are refused."""

    name: str = "auto"
    tensor_parallel_size: int | None = None  # ranks that share one copy of each matrix; null: all
    pipeline_parallel_size: int | None = None  # stages; null: all ranks
    microbatches: int | None = None  # per step of a pipeline; null: twice the stages
    schedule: str = "1f1b"  # gpipe, 1f1b, interleaved_1f1b
    timeout_s: float = 1800.0  # of a collective
    backend: str | None = None  # null: nccl on GPU, gloo on CPU
    reshard_after_forward: bool = True  # fsdp: drop gathered weights between forward and backward
    accumulate_shards: bool = False  # fsdp: reduce at each micro-step, for 1/N of the memory
    cpu_offload: bool = False  # fsdp: weights, gradients and optimizer states in host memory
    bucket_cap_mb: float = 25.0  # ddp
    gradient_as_bucket_view: bool = True  # ddp: gradients live in the buckets, one copy less
    static_graph: bool = False  # ddp
    find_unused_parameters: bool = False  # ddp
    comm_hook: str = "none"  # ddp: none, bf16, fp16, powersgd


@dataclass
class CheckpointConfig:
    """When a run is saved, and what is kept."""

    name: str = "default"
    every_n_steps: int | None = None  # null: at every validation
    keep: int = 2  # newest ones kept besides the best
    monitor: str = "val/loss"  # the best has the lowest
    background: bool = True  # large ones are written while steps go on, from a copy in memory


@dataclass
class LauncherConfig:
    """How local ranks are started and watched."""

    max_restarts: int = 0  # after a lost rank, from the newest good checkpoint
    timeout_s: float | None = None  # without progress a rank is hung; null: strategy.timeout_s


@dataclass
class RunConfig:
    """The whole run.

    Attributes:
        runs_here: False in the schema of a verb that speaks of another machine (a plan): then
            only the config itself is checked, not this machine, its folders and files.
    """

    runs_here: ClassVar[bool] = True

    name: str = "train"
    task: str = "fit"  # fit, validate, test
    seed: int = 42
    output_dir: str = ""
    run_dir: str = ""
    max_tokens: float | None = None  # trained on; the steps are derived, instead of max_steps
    ckpt_path: str | None = None  # a path, last or best: exact resume
    init_from: str | None = None  # a run, a checkpoint, a GPT-2 folder: its weights, at step 0
    from_run: str | None = None  # a run folder: its overrides first, then those typed
    allow_changes: list[str] = field(default_factory=list)  # keys that may differ on a resume
    on_nonfinite: str = "stop"  # stop, skip
    objective: str = "val/loss"  # what a sweep minimises
    debug: bool = False  # tracebacks
    print_config: bool = False
    allowed_targets: list[str] = field(default_factory=list)  # packages a _target_ may lie in
    model: dict[str, Any] = field(
        default_factory=lambda: {"compile": "none", "activation_checkpointing": "none"}
    )
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(
        default_factory=lambda: {
            "lr": None,  # of these two null: the default of the class
            "weight_decay": None,
            "lr_scaling": "none",
            "reference_batch_size": 32,
        }
    )
    scheduler: dict[str, Any] = field(
        default_factory=lambda: {
            # a whole number: steps; below 1: a share of the run; null: 100 steps or a tenth
            # of the run, whichever is less
            "warmup_steps": None,
            "total_steps": None,  # null: the run's length
            "start_factor": 0.1,
            "min_factor": 0.1,
        }
    )
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: dict[str, Any] = field(default_factory=dict)
    profiler: dict[str, Any] = field(default_factory=dict)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)


def register(schema: type[RunConfig] = RunConfig) -> None:
    """Makes the schema, a verb's with keys of its own, known to Hydra, and our resolvers."""
    ConfigStore.instance().store(name="schema", node=schema)
    register_resolvers()


def register_resolvers() -> None:
    """Makes our resolvers known to OmegaConf."""
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("default_output_dir", default_output_dir, replace=True)
    OmegaConf.register_new_resolver("plus", lambda left, right: left + right, replace=True)


def default_output_dir() -> str:
    """GPTRAIN_OUTPUT_DIR, or outputs/ of the project, wherever the command is typed."""
    return os.environ.get("GPTRAIN_OUTPUT_DIR") or str(PROJECT / "outputs")
