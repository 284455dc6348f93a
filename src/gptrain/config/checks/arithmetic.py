"""Numbers that must fit each other, known from the config alone."""

from __future__ import annotations

from gptrain.config.checks.keys import answer_unknown, known_keys
from gptrain.config.checks.run import Run

DUMMY = "gptrain.data.DummyTextDataset"
LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "max_tokens")  # of a run, each in steps
DECAYING = {f"gptrain.optim.warmup_{way}" for way in ("cosine", "linear", "stable_decay")}


def check_arithmetic(run: Run) -> None:
    """Model, batch, schedule and length of the run against each other."""
    _model(run)
    _data(run)
    _schedule(run)
    _length(run)
    _trainer(run)
    _task(run)


def divisors(number: int) -> str:
    """All divisors of a number, as one writes them."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return ", ".join(map(str, sorted({*small, *(number // i for i in small)})))


def _model(run: Run) -> None:
    width, heads = run.get("model.d_model"), run.get("model.n_heads")
    if width and heads and width % heads:
        below = width // heads * heads
        near = ", ".join(str(size) for size in (below, below + heads) if size)
        run.error("model.d_model", f"not divisible by model.n_heads={heads}; nearest: {near}")
    size, layers = run.get("strategy.tensor_parallel_size"), run.get("model.n_layers")
    if size and heads and heads % size:
        run.error(
            "strategy.tensor_parallel_size",
            f"does not divide model.n_heads={heads}, a rank must hold whole heads",
            allowed=divisors(heads),
        )
    stages = run.get("strategy.pipeline_parallel_size")
    per_rank = 2 if run.get("strategy.schedule") == "interleaved_1f1b" else 1
    if stages and layers and stages * per_rank > layers:
        run.error(
            "strategy.pipeline_parallel_size",
            f"{stages * per_rank} stages, but model.n_layers={layers}: each holds at least one",
            allowed=f"1 .. {layers // per_rank}",
        )


def _data(run: Run) -> None:
    length, longest = run.get("data.seq_len"), run.get("model.max_seq_len")
    dummy = run.get("data.train._target_") == DUMMY
    positions = length - 1 if length and dummy else length  # its last token is a target only
    if positions and longest and positions > longest:
        run.error(
            "data.seq_len",
            f"longer than model.max_seq_len={longest}",
            attempt=f"data.seq_len={longest} or model.max_seq_len={positions}",
        )
    for part in ("train", "val", "test"):
        _part(run, f"data.{part}", longest)
    if dummy and length == 1:
        run.error("data.seq_len", "must be >= 2, one token and its target")
    if run.sound("data.global_batch_size") and run.get("trainer.accumulate_grad_batches", 1) != 1:
        run.error(
            "trainer.accumulate_grad_batches",
            "data.global_batch_size is set too, and derives it",
            attempt="trainer.accumulate_grad_batches=1, or data.global_batch_size=null",
        )
    vocabulary, tokenizer = run.get("model.vocab_size"), run.get("data.tokenizer")
    if vocabulary and vocabulary < 256 and tokenizer in ("bytes", "bpe"):
        run.error(
            "model.vocab_size",
            f"data.tokenizer={tokenizer} has at least the 256 bytes",
            attempt="model.vocab_size=256",
        )


def _part(run: Run, part: str, longest: int | None) -> None:
    """A data set that was given sizes of its own."""
    key = f"{part}.seq_len"
    length = run.get(key) if key not in run.derived else None
    if isinstance(length, int) and longest:
        dummy = run.get(f"{part}._target_") == DUMMY
        if length - dummy > longest:
            run.error(key, f"longer than model.max_seq_len={longest}")
    key, known = f"{part}.vocab_size", run.get("model.vocab_size")
    size = run.get(key) if key not in run.derived else None
    if isinstance(size, int) and known and size > known:
        run.error(key, f"more tokens than model.vocab_size={known}", attempt=f"{key}={known}")


def _schedule(run: Run) -> None:
    warmup, total = run.get("scheduler.warmup_steps"), run.get("scheduler.total_steps")
    if warmup and total and warmup > total:
        run.error(
            "scheduler.warmup_steps",
            f"must be <= scheduler.total_steps={total}",
            attempt=f"scheduler.warmup_steps={total // 10}",
        )
    if (run.get("optimizer.lr") or 0) > 1:
        run.warn("optimizer.lr", "above 1; rates of AdamW and Muon lie between 1e-5 and 1e-1")


def _length(run: Run) -> None:
    def unlimited(key: str) -> bool:
        told = {key, key.split(".")[0]} & run.wrong
        return not told and run.get(key) in (None, -1)

    if run.get("task") == "fit" and not run.get("trainer.fast_dev_run"):
        has_no_length = all(unlimited(key) for key in LENGTHS)
        if has_no_length and unlimited("trainer.max_time"):
            run.error(
                "",
                "no stop condition: set one of trainer.max_steps, trainer.max_epochs, "
                "trainer.max_time",
                attempt="trainer.max_epochs=3",
            )
        elif (
            has_no_length
            and run.get("scheduler._target_") in DECAYING
            and run.get("scheduler.total_steps") is None
        ):
            run.error(
                "scheduler.total_steps",
                "this schedule decays over a run whose length in steps trainer.max_time hides",
                value="null",
                attempt="scheduler=warmup_constant, or scheduler.total_steps=<steps>",
            )
        if run.get("trainer.limit_train_batches") == 0:
            run.error(
                "trainer.limit_train_batches",
                "nothing is left to train on",
                attempt="task=validate, or trainer.limit_train_batches=null",
            )
    if run.sound("max_tokens") and not unlimited("trainer.max_steps"):
        run.error(
            "max_tokens",
            f"excludes trainer.max_steps={run.get('trainer.max_steps')}: both end the run",
            attempt="trainer.max_steps=-1, or max_tokens=null",
        )
    steps, least = run.get("trainer.max_steps", -1), run.get("trainer.min_steps")
    if least and 0 < steps < least:
        run.error("trainer.min_steps", f"more than trainer.max_steps={steps}")
    epochs, least = run.get("trainer.max_epochs"), run.get("trainer.min_epochs")
    if least and epochs and 0 < epochs < least:
        run.error("trainer.min_epochs", f"more than trainer.max_epochs={epochs}")


def _trainer(run: Run) -> None:
    if run.get("trainer.gradient_clip_algorithm") and run.get("trainer.gradient_clip_val") is None:
        run.warn("trainer.gradient_clip_algorithm", "no effect, trainer.gradient_clip_val is null")
    if run.get("trainer.limit_predict_batches") is not None:
        run.warn("trainer.limit_predict_batches", "no effect, there is no prediction task")
    if run.get("trainer.min_epochs"):
        run.warn("trainer.min_epochs", "no effect, nothing ends a run before its last step")
    if run.get("trainer.sync_batchnorm"):
        run.warn("trainer.sync_batchnorm", "no effect on a model without batch normalisation")
    if run.get("trainer.reload_dataloaders_every_n_epochs"):
        run.error(
            "trainer.reload_dataloaders_every_n_epochs",
            "a run is one long epoch here, so that it can resume at any step",
            attempt="trainer.reload_dataloaders_every_n_epochs=0",
        )


def _task(run: Run) -> None:
    for name in run.get("allow_changes") or []:
        if name not in run.nodes:
            wrong, _ = answer_unknown(name, known_keys())
            run.error("allow_changes", f"{name}: {wrong}")
    if run.sound("ckpt_path", "init_from"):
        run.error("init_from", "excludes ckpt_path: fresh weights or an exact resume, not both")
    if run.get("allow_changes") and run.get("ckpt_path") is None and "ckpt_path" not in run.wrong:
        run.warn("allow_changes", "no effect without ckpt_path")
    if (
        run.get("task") in ("validate", "test")
        and run.get("ckpt_path") is None
        and run.get("init_from") is None
        and run.get("from_run") is None
        and not run.get("trainer.fast_dev_run")
    ):
        run.warn("task", "no ckpt_path: it measures initial weights", attempt="ckpt_path=best")
    if run.get("optimizer.lr_scaling") == "none" and run.get(
        "optimizer.reference_batch_size"
    ) not in (None, 32):
        run.warn("optimizer.reference_batch_size", "no effect under optimizer.lr_scaling=none")
    objective, task = run.get("objective"), run.get("task")
    if task == "validate" and objective in ("train/loss", "test/loss"):
        run.warn("objective", "not measured under task=validate")
    tokenizer = run.has("data.tokenizer") or run.has("data.pattern")
    if run.get("data.train._target_") == DUMMY and not tokenizer:
        for key in ("checkpoint.monitor", "objective"):
            if run.get(key) == "val/bits_per_byte":
                run.error(
                    key,
                    "random tokens stand for no bytes",
                    allowed="val/loss, val/perplexity",
                    attempt=f"{key}=val/loss",
                )
