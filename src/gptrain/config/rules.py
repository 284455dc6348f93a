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
from gptrain.core.strategies import STRATEGIES, TENSOR

PHASES = ("warmup", "decay", "total")


def problem(
    run: RunConfig, key: str, message: str, hint: str = "", code: int = BAD_CONFIG
) -> ConfigIssue:
    """Return a problem of a key, with the value that the key has in the config.

    Args:
        run: Typed config.
        key: Dotted key. A key without a value is shown as null.
        message: Reason why the value is wrong.
        hint: Override or command to type instead.
        code: Exit code. DONE (0) makes the problem a warning.
    """
    return ConfigIssue(key, show(run.value_of(key)), message, hint=hint, code=code)


def check_rules(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each key that contradicts another one. Imports no torch.

    Args:
        run: Typed config.
    """
    if isinstance(run.model, DecoderConfig):
        yield from _check_heads(run, run.model)
        tokenizer = (
            None if isinstance(run.data, DataModuleConfig) else run.data.extra.get("tokenizer")
        )
        if tokenizer in ("bytes", "bpe") and run.model.vocab_size < 256:
            message = f"data.tokenizer={tokenizer} has at least 256 tokens, one per byte"
            yield problem(run, "model.vocab_size", message, "model.vocab_size=256")
    yield from _check_strategy(run)
    if isinstance(run.data, DataModuleConfig):
        message = "not with a LightningDataModule, whose order, samples and tokens are not known"
        hint = "data.train._target_ and data.val._target_, a dataset or a stream each"
        keys = ["max_tokens", "data.global_batch_size", "trainer.overfit_batches"]
        for key in (*keys, *(f"scheduler.{phase}_tokens" for phase in PHASES)):
            if run.value_of(key):
                yield problem(run, key, message, hint)
    yield from _check_length(run)
    is_path = run.ckpt_path not in (None, "last", "best")
    if is_path and run.init_from and not run.from_run:  # else it may be of the earlier run
        message = "excludes a path in ckpt_path: a run has one source of its first weights"
        yield problem(run, "init_from", message, "ckpt_path=last")
    has_weights = run.ckpt_path or run.init_from or run.from_run
    if run.task != "fit" and not has_weights and not run.trainer.fast_dev_run:
        message = "no ckpt_path: the task evaluates the initial weights"
        yield problem(run, "task", message, "ckpt_path=best", DONE)


def _check_heads(run: RunConfig, model: DecoderConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the width of a decoder cannot be divided into heads.

    RoPE, in a Llama, rotates pairs of features of a head.
    """
    key, size, divisor = "model.d_model", model.d_model, model.n_heads
    if isinstance(model, LlamaConfig):
        if model.n_heads % model.n_kv_heads:
            yield problem(run, "model.n_kv_heads", f"does not divide model.n_heads={model.n_heads}")
        divisor *= 2
        if model.d_head:
            key, size, divisor = "model.d_head", model.d_head, 2
    if size % divisor:
        below = size // divisor * divisor
        factor = "2 x " if isinstance(model, LlamaConfig) else ""
        of = "2" if key == "model.d_head" else f"{factor}model.n_heads={model.n_heads}"
        yield problem(run, key, f"not divisible by {of}; nearest: {below}, {below + divisor}")


def _check_strategy(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each option under which a strategy would compute something else."""
    name, model = run.strategy.name, run.model
    strategy = STRATEGIES["ddp" if name == "auto" else name]
    if find_precision(run.trainer.precision).is_fp16 and not strategy.is_standard:
        message = f"strategy={name} does not scale the loss, which fp16 needs"
        yield problem(run, "trainer.precision", message, "trainer.precision=bf16-mixed")
    if strategy.needs and model.compile == "model":
        message = f"strategy={name} has collectives and hooks between the blocks"
        yield problem(run, "model.compile", message, "model.compile=blocks")
    recomputes = model.activation_checkpointing != "none"
    if TENSOR in strategy.axes and recomputes and model.compile != "none":
        message = f"strategy={name}: torch cannot compile recomputed activations of sharded weights"
        yield problem(run, "model.compile", message, "model.activation_checkpointing=none")
    if isinstance(run.data, DataModuleConfig) and not strategy.is_standard:
        message = "divides the samples, and a LightningDataModule divides its own"
        yield problem(run, "strategy.name", message, "strategy=ddp")


def _check_length(run: RunConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if nothing ends the run, or if two keys set one length."""
    trainer, scheduler = run.trainer, run.scheduler
    for phase in PHASES:
        length = scheduler.phase(phase)
        if length.steps is not None and length.tokens:
            key = f"scheduler.{phase}_steps"
            message = f"excludes {key}={show(length.steps)}: both set the same length"
            yield problem(run, f"scheduler.{phase}_tokens", message, f"{key}=null")
    warmup, total = scheduler.phase("warmup"), scheduler.phase("total")
    for unit, n_warmup, n_total in zip(("steps", "tokens"), warmup, total, strict=True):
        if n_warmup and n_total and n_warmup > n_total:
            message = f"must be <= scheduler.total_{unit}={show(n_total)}"
            yield problem(run, f"scheduler.warmup_{unit}", message)
    if run.max_tokens and trainer.max_steps != -1:
        message = f"excludes trainer.max_steps={trainer.max_steps}: both end the run"
        yield problem(run, "max_tokens", message, "trainer.max_steps=-1, or max_tokens=null")
    has_steps = trainer.max_steps != -1 or run.max_tokens or trainer.fast_dev_run
    if run.task != "fit" or has_steps or effective_max_epochs(trainer, None) is not None:
        return
    if trainer.max_time is None:
        message = "no stop condition: set trainer.max_steps, trainer.max_epochs or trainer.max_time"
        yield ConfigIssue("", None, message, hint="trainer.max_epochs=3")
    elif isinstance(scheduler, DecayConfig) and not any(total):
        message = "the schedule decays until the last step, which trainer.max_time leaves unknown"
        yield problem(run, "scheduler.total_steps", message, "scheduler=warmup_constant")
