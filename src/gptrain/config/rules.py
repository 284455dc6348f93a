"""Rules between keys, without which a run would silently compute something else, or never end.

The net, the strategy and the batch have rules of their own, which `assemble.run.check` applies
before a rank starts. They are not repeated in this file, except for the heads of shipped nets: the
planner counts these nets without building them.
"""

from collections.abc import Iterator

from gptrain.core.data_schema import DataModuleConfig
from gptrain.core.errors import BAD_CONFIG, DONE, ConfigIssue, show
from gptrain.core.lengths import effective_max_epochs
from gptrain.core.precision import find_precision
from gptrain.core.schema import DecayConfig, DecoderConfig, LlamaConfig, RunConfig
from gptrain.core.strategies import STRATEGIES

PHASES = ("warmup", "decay", "total")


def problem(
    run: RunConfig, key: str, message: str, hint: str = "", code: int = BAD_CONFIG
) -> ConfigIssue:
    """Return the problem of a key, with its value in the config. `code` 0 makes it a warning."""
    return ConfigIssue(key, show(run.value_of(key)), message, hint=hint, code=code)


def check_rules(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each key that contradicts another one. Imports no torch."""
    name, model, scheduler = run.strategy.name, run.model, run.scheduler
    if isinstance(model, DecoderConfig):
        yield from _check_heads(run, model)
    strategy = STRATEGIES["ddp" if name == "auto" else name]
    if find_precision(run.trainer.precision).is_fp16 and not strategy.is_standard:
        message = f"strategy={name} does not scale the loss, which fp16 needs"
        yield problem(run, "trainer.precision", message, "trainer.precision=bf16-mixed")
    if strategy.needs and model.compile == "model":
        message = f"strategy={name} has collectives and hooks between the blocks"
        yield problem(run, "model.compile", message, "model.compile=blocks")
    if isinstance(run.data, DataModuleConfig):
        if not strategy.is_standard:
            message = "divides the samples, and a LightningDataModule divides its own"
            yield problem(run, "strategy.name", message, "strategy=ddp")
        message = "not with a LightningDataModule, whose order, samples and tokens are not known"
        keys = ["max_tokens", "data.global_batch_size", "trainer.overfit_batches"]
        for key in (*keys, *(f"scheduler.{phase}_tokens" for phase in PHASES)):
            if run.value_of(key):
                yield problem(run, key, message, "data.train._target_ and data.val._target_")
    for phase in PHASES:
        steps, tokens = scheduler.phase(phase)
        if steps is not None and tokens:
            key = f"scheduler.{phase}_steps"
            message = f"excludes {key}={show(steps)}: both set the same length"
            yield problem(run, f"scheduler.{phase}_tokens", message, f"{key}=null")
    trainer = run.trainer
    has_end = trainer.max_steps != -1 or run.max_tokens or trainer.fast_dev_run
    has_end = has_end or effective_max_epochs(trainer, None) is not None
    needs_end = isinstance(scheduler, DecayConfig) and not any(scheduler.phase("total"))
    if run.task == "fit" and needs_end and not has_end:
        message = "the schedule decays until the last step, which is not known"
        yield problem(run, "scheduler.total_steps", message, "scheduler=warmup_constant")
    is_path = run.ckpt_path not in (None, "last", "best")
    if is_path and run.init_from and not run.from_run:  # else it may be of the earlier run
        message = "excludes a path in ckpt_path: a run has one source of its first weights"
        yield problem(run, "init_from", message, "ckpt_path=last")
    has_weights = run.ckpt_path or run.init_from or run.from_run
    if run.task != "fit" and not has_weights and not trainer.fast_dev_run:
        message = "no ckpt_path: the task evaluates the initial weights"
        yield problem(run, "task", message, "ckpt_path=best", DONE)


def _check_heads(run: RunConfig, model: DecoderConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the width of a decoder cannot be divided into heads."""
    n_heads, has_pairs = model.n_heads, isinstance(model, LlamaConfig)
    if isinstance(model, LlamaConfig) and n_heads % model.n_kv_heads:
        yield problem(run, "model.n_kv_heads", f"does not divide {n_heads} heads")
    key = "model.d_head" if getattr(model, "d_head", None) else "model.d_model"
    d_head = getattr(model, "d_head", None) or model.d_model / n_heads
    if d_head % (2 if has_pairs else 1):
        of_pairs = ", each of pairs of features" if has_pairs else ""  # RoPE rotates pairs
        yield problem(run, key, f"not divisible into {n_heads} heads{of_pairs}")
