"""Options that the chosen strategy would not read, or cannot be combined with."""

from __future__ import annotations

from dataclasses import fields

from gptrain.config.checks.forms import devices
from gptrain.config.checks.run import Run
from gptrain.config.schema import StrategyConfig

# Option -> strategies that read it; "auto" becomes ddp on several devices.
READ_BY = {
    "tensor_parallel_size": ("tensor_parallel", "fsdp_tensor_parallel"),
    "pipeline_parallel_size": ("pipeline", "ddp_pipeline"),
    "microbatches": ("pipeline", "ddp_pipeline"),
    "schedule": ("pipeline", "ddp_pipeline"),
    "reshard_after_forward": ("fsdp", "fsdp_tensor_parallel"),
    "accumulate_shards": ("fsdp", "fsdp_tensor_parallel"),
    "cpu_offload": ("fsdp", "fsdp_tensor_parallel"),
    "bucket_cap_mb": ("ddp",),
    "gradient_as_bucket_view": ("ddp",),
    "static_graph": ("ddp",),
    "find_unused_parameters": ("ddp",),
    "comm_hook": ("ddp",),
}
DEFAULTS = {item.name: item.default for item in fields(StrategyConfig)}
WHOLE = ("auto", "single", "ddp")  # strategies that take any net
HALF = ("16-mixed", 16, "16", "16-true")
# Scheduler -> keys that it does not read.
UNREAD = {
    "gptrain.optim.constant": ("warmup_steps", "total_steps", "start_factor", "min_factor"),
    "gptrain.optim.warmup_constant": ("total_steps", "min_factor"),
}
SCHEDULER_DEFAULTS = {
    "warmup_steps": None,
    "total_steps": None,
    "start_factor": 0.1,
    "min_factor": 0.1,
}


def check_strategy(run: Run) -> None:
    """Strategy, precision, scheduler and launcher: nothing is accepted without effect."""
    name = run.get("strategy.name")
    if name is not None:
        _unread_options(run, name)
        _devices(run, name)
        _combinations(run, name)
        _microbatches(run, name)
    _precision(run)
    _scheduler(run)
    _checkpoint(run)


def count_devices(value: object) -> int | None:
    """Ranks on one node; None where the machine decides (auto, -1) or the value is wrong."""
    if devices(value) or value in ("auto", -1, "-1"):
        return None
    if isinstance(value, list):
        return len(value)
    if isinstance(value, str) and "," in value:
        return len([part for part in value.split(",") if part])
    return int(value)


def is_set(run: Run, option: str) -> bool:
    """Whether an option of the strategy differs from its default."""
    value = run.get(f"strategy.{option}")
    return value is not None and value != DEFAULTS[option]


def _unread_options(run: Run, name: str) -> None:
    for option, readers in READ_BY.items():
        one_rank = option.endswith("_size") and run.get(f"strategy.{option}") == 1
        if not is_set(run, option) or name in readers or one_rank:
            continue
        if name == "auto" and "ddp" in readers:
            if count_devices(run.get("trainer.devices")) == 1 and run.get("trainer.num_nodes") == 1:
                run.warn(f"strategy.{option}", "no effect on one device")
            continue
        run.error(
            f"strategy.{option}",
            f"no effect under strategy={name}",
            attempt=f"strategy={readers[0]}, or leave {option} out",
            allowed=f"under strategy={', '.join(readers)}",
        )
    if name == "single":
        for option in ("timeout_s", "backend"):
            if is_set(run, option):
                run.error(
                    f"strategy.{option}",
                    "no effect under strategy=single, which has no process group",
                    attempt="strategy=ddp",
                )


def _devices(run: Run, name: str) -> None:
    n_local, n_nodes = count_devices(run.get("trainer.devices")), run.get("trainer.num_nodes")
    if n_local is None or n_nodes is None:
        return
    if name == "single" and n_local * n_nodes > 1:
        key = "trainer.devices" if n_local > 1 else "trainer.num_nodes"
        run.error(key, "more than one device under strategy=single", attempt="strategy=ddp")
    if name not in ("single", "auto") and n_local * n_nodes == 1:
        wrong = "no effect on one device"
        run.warn("strategy", wrong, value=name, attempt="trainer.devices=2")


def _combinations(run: Run, name: str) -> None:
    """What only whole replicas can do."""
    if name in WHOLE:
        return
    if run.get("trainer.precision") in HALF:
        wrong = f"strategy={name} does not scale losses"
        run.error("trainer.precision", wrong, attempt="trainer.precision=bf16-mixed")
    if run.get("model.compile") == "model":
        run.error(
            "model.compile",
            f"under strategy={name} collectives and hooks lie between the blocks",
            attempt="model.compile=blocks",
        )
    recomputes = run.get("model.activation_checkpointing") not in (None, "none")
    if "tensor" in name and recomputes and run.get("model.compile") not in (None, "none"):
        run.error(
            "model.compile",
            f"under strategy={name} torch cannot compile what is recomputed from cut weights",
            attempt="model.compile=none, or model.activation_checkpointing=none",
        )


def _microbatches(run: Run, name: str) -> None:
    if name not in READ_BY["microbatches"]:
        return
    batch, stages = run.get("data.batch_size"), run.get("strategy.pipeline_parallel_size")
    if stages is None and name == "ddp_pipeline":
        stages = 2
    if stages is None:
        stages = count_devices(run.get("trainer.devices"))
    micro = run.get("strategy.microbatches")
    given = micro is not None
    if not given and stages and "strategy.microbatches" not in run.wrong:
        micro = 2 * stages
    if not micro or not batch:
        return
    key = "strategy.microbatches" if given else "data.batch_size"
    if batch % micro:
        near = micro * max(1, batch // micro)
        run.error(
            key,
            f"does not divide data.batch_size={batch}"
            if given
            else f"not divisible into {micro} microbatches, two per stage",
            attempt=f"data.batch_size={near}",
        )
    schedule = run.get("strategy.schedule")
    if given and stages and schedule == "1f1b" and micro < stages:
        run.error(
            key,
            f"1f1b needs at least one microbatch per stage ({stages})",
            attempt=f"strategy.microbatches={2 * stages}, or strategy.schedule=gpipe",
        )
    if given and stages and schedule == "interleaved_1f1b" and micro % stages:
        run.error(
            key,
            f"no multiple of the {stages} ranks, as interleaved_1f1b needs",
            attempt=f"strategy.microbatches={2 * stages}",
        )


def _precision(run: Run) -> None:
    precision, accelerator = run.get("trainer.precision"), run.get("trainer.accelerator")
    if accelerator == "cpu":
        refuse_on_cpu(run)
        if run.get("strategy.backend") == "nccl":
            run.error("strategy.backend", "nccl needs GPUs", attempt="strategy.backend=gloo")
        if run.get("strategy.cpu_offload"):
            run.error(
                "strategy.cpu_offload",
                "no effect under trainer.accelerator=cpu",
                attempt="strategy.cpu_offload=false",
            )
    if precision == "16-true" and run.get("task") == "fit":
        run.error(
            "trainer.precision",
            "Adam's eps is zero in fp16, training ends in NaN",
            allowed="under task=validate and task=test",
            attempt="trainer.precision=bf16-true",
        )


def refuse_on_cpu(run: Run) -> None:
    """fp16 with a loss scaler has no kernels on a CPU."""
    precision = run.get("trainer.precision")
    if precision in HALF or str(precision).startswith("transformer-engine"):
        run.error(
            "trainer.precision", "not supported on CPU", attempt="trainer.precision=bf16-mixed"
        )


def _scheduler(run: Run) -> None:
    target = run.get("scheduler._target_")
    for key in UNREAD.get(target, ()) if isinstance(target, str) else ():
        value = run.get(f"scheduler.{key}")
        if value is not None and value != SCHEDULER_DEFAULTS[key]:
            run.warn(f"scheduler.{key}", f"no effect under scheduler={target.rpartition('.')[2]}")


def _checkpoint(run: Run) -> None:
    if run.get("checkpoint.name") == "none" and run.get("checkpoint.every_n_steps"):
        run.error(
            "checkpoint.every_n_steps",
            "no effect under checkpoint=none",
            attempt="checkpoint=every_n_steps",
        )
    every, is_sound = "checkpoint.every_n_steps", "checkpoint.every_n_steps" not in run.wrong
    if run.get("checkpoint.name") == "every_n_steps" and run.get(every) is None and is_sound:
        run.error(every, "required under checkpoint=every_n_steps", value="null")
