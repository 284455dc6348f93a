"""How the ranks share the work: sizes, batch and steps, once their number is known."""

from __future__ import annotations

import math

from gptrain.config.checks.arithmetic import DUMMY, divisors
from gptrain.config.checks.run import Run
from gptrain.config.checks.strategies import READ_BY, count_devices
from gptrain.launch.process import this_process
from gptrain.plan import BatchPlan, ParallelDims, parallel_dims, plan_batch
from gptrain.problems import BAD_CONFIG


def check_known_world(run: Run) -> None:
    """As check_world, where the config or a launcher already says how many ranks there are."""
    n_local, n_nodes = count_devices(run.get("trainer.devices")), run.get("trainer.num_nodes")
    try:
        process = this_process()
    except (ValueError, KeyError):
        return  # `place` tells
    if process.is_rank:
        check_world(run, process.world_size)
    elif n_local and n_nodes:
        check_world(run, n_local * n_nodes)


def check_world(run: Run, world_size: int) -> None:
    """ParallelDims, divisibility of the batch, and the length of the run."""
    split = plan_dims(run, world_size)
    batch = _batch(run, split) if split else None
    if batch and run.get("data.train._target_") == DUMMY:
        n_samples = run.get("data.train.num_samples") or run.get("data.num_samples")
        if n_samples:
            check_steps(run, batch, n_samples, "data.num_samples")


def check_steps(
    run: Run, batch: BatchPlan, n_samples: int, key: str, code: int = BAD_CONFIG
) -> None:
    """At least one step, and a schedule that fits the run."""
    if run.get("task") != "fit":
        return
    if not batch.steps_per_epoch(n_samples):
        run.error(
            key,
            f"{n_samples} sequences, one step needs {batch.global_batch_size}",
            attempt="a smaller data.batch_size, data.global_batch_size or data.seq_len",
            code=code,
        )
        return
    tokens, asked = _step_tokens(run, batch), run.get("max_tokens")
    if tokens and asked and asked < tokens:
        run.error("max_tokens", f"less than the {tokens} tokens of one step")
    steps = _steps(run, batch.steps_per_epoch(n_samples))
    total, warmup = run.get("scheduler.total_steps"), run.get("scheduler.warmup_steps")
    if steps is None or run.get("trainer.fast_dev_run"):
        return
    if total and total < steps:
        run.warn(
            "scheduler.total_steps",
            f"shorter than the run of {steps} steps, the rest is at its lowest rate",
            attempt="scheduler.total_steps=null",
        )
    if warmup and warmup > steps and not total:
        run.warn("scheduler.warmup_steps", f"longer than the run of {steps} steps")
    every = run.get("trainer.val_check_interval")
    if isinstance(every, int) and every > steps:
        run.warn(
            "trainer.val_check_interval",
            f"longer than the run of {steps} steps, it is validated at its end only",
        )


def global_batch(run: Run) -> BatchPlan | None:
    """The batch of a run whose machine is known; None where it does not fit."""
    split = plan_dims(run, run.world_size) if run.world_size else None
    return _batch(run, split) if split else None


def plan_dims(run: Run, world_size: int) -> ParallelDims | None:
    """Ranks along each axis; None where the sizes do not fit, which is told."""
    name = run.get("strategy.name")
    if name is None:
        return None
    if name == "single" and world_size > 1:
        return None  # told by `strategies` or `place`
    sizes = {key: _size(run, key) for key in ("tensor_parallel_size", "pipeline_parallel_size")}
    for key, size in sizes.items():
        if size and name in READ_BY[key] and world_size % size:
            run.error(
                f"strategy.{key}",
                f"does not divide {world_size} ranks",
                allowed=divisors(world_size),
            )
            return None
    if any(key.startswith("strategy.") for key in run.wrong):
        return None
    try:
        split = parallel_dims(name, world_size, *sizes.values())
    except ValueError as error:
        given = next((f"strategy.{key}" for key, size in sizes.items() if size), "strategy.name")
        wrong = str(error).removeprefix(f"strategy={name}: ")
        run.error(given if given != "strategy.name" else "strategy", wrong, value=None)
        run.wrong.add("strategy.name")
        return None
    heads, layers = run.get("model.n_heads"), run.get("model.n_layers")
    per_rank = 2 if run.get("strategy.schedule") == "interleaved_1f1b" else 1
    if sizes["tensor_parallel_size"] is None and heads and heads % split.tensor:
        run.error(
            "strategy.tensor_parallel_size",
            f"{split.tensor} ranks do not divide model.n_heads={heads}",
            value="null",
            allowed=divisors(math.gcd(heads, world_size)),
        )
        return None
    stages = split.pipeline * per_rank
    if sizes["pipeline_parallel_size"] is None and layers and stages > layers:
        run.error(
            "strategy.pipeline_parallel_size",
            f"{stages} stages, but model.n_layers={layers}: each holds at least one",
            value="null",
        )
        return None
    return split


def _size(run: Run, key: str) -> int | None:
    """A size, also one that was found not to fit the model: it may not fit the ranks either."""
    size = run.nodes.get(f"strategy.{key}")
    return size if isinstance(size, int) and size > 0 else None


def _batch(run: Run, split: ParallelDims) -> BatchPlan | None:
    size, accumulate = run.get("data.batch_size"), run.get("trainer.accumulate_grad_batches")
    total = run.get("data.global_batch_size")
    if size is None or accumulate is None or "data.global_batch_size" in run.wrong:
        return None
    try:
        return plan_batch(size, total, accumulate, split.data)
    except ValueError as error:
        run.error("data.global_batch_size", str(error))
        return None


def _step_tokens(run: Run, batch: BatchPlan) -> int | None:
    length = run.get("data.seq_len")
    if not length:
        return None
    positions = length - 1 if run.get("data.train._target_") == DUMMY else length
    return batch.global_batch_size * positions


def _steps(run: Run, epoch_steps: int) -> int | None:
    """Steps of the run; None where only time ends it, or a limit is set that the run turns into
    steps by its own rule."""
    if run.get("trainer.limit_train_batches") is not None or run.get("max_tokens") is not None:
        return None
    epochs, steps = run.get("trainer.max_epochs"), run.get("trainer.max_steps")
    ends = [epochs * epoch_steps] if epochs not in (None, -1) else []
    ends += [steps] if steps not in (None, -1) else []
    return min(ends, default=None)
