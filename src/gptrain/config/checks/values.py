"""Every key with its rule: type, range, closed set. One table, read by all that names a key."""

from __future__ import annotations

from gptrain.config.checks.forms import (
    count,
    devices,
    duration,
    fast_dev_run,
    interval,
    limit,
    name,
    share,
    warmup,
)
from gptrain.config.checks.rules import INT32_MAX, Either, Flag, Listing, Number, Rule, Text, Word
from gptrain.config.checks.run import Run

SEED_MAX = 2**32 - 1  # numpy's generators take no more
WORKERS_MAX = 384  # cores of the largest two-socket x86 server of 2025 (2 x AMD EPYC 9965)
METRICS = ("val/loss", "val/perplexity", "val/bits_per_byte", "train/loss", "test/loss")
STRATEGIES = (
    "auto", "single", "ddp", "fsdp", "tensor_parallel", "pipeline", "fsdp_tensor_parallel",
    "ddp_pipeline",
)  # fmt: skip
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "auto")
PRECISION_ALIASES = (  # Lightning's other names
    "16-true", "transformer-engine", "transformer-engine-float16", "32", "64", "16", "bf16",
    32, 64, 16,
)  # fmt: skip


LIMIT = Either(1.0, True, limit, "a fraction in [0, 1], a whole number >= 0, or null")
FREE_LIST = Listing([], False, Text())

RULES: dict[str, Rule] = {
    "name": Either("train", False, name, "a name for the run's folder"),
    "task": Word("fit", words=("fit", "validate", "test")),
    "seed": Number(42, low=0, high=SEED_MAX, whole=True),
    "output_dir": Text("outputs", path=True),
    "run_dir": Text("outputs/mine", path=True),
    "ckpt_path": Text("last", True, path=True),
    "init_from": Text(None, True, path=True),
    "from_run": Text(None, True, path=True),
    "max_tokens": Number(None, True, low=1, high=2**63),
    "allow_changes": FREE_LIST,
    "allowed_targets": FREE_LIST,
    "on_nonfinite": Word("stop", words=("stop", "skip")),
    "objective": Word("val/loss", words=METRICS),
    "debug": Flag(True),
    "print_config": Flag(True),
    "model.vocab_size": count(1, 50257),
    "model.d_model": count(1, 512),
    "model.n_heads": count(1, 8),
    "model.n_layers": count(1, 6),
    "model.max_seq_len": count(1, 512),
    "model.dropout": share(0.1, below=True),
    "model.activation": Word("gelu", words=("gelu", "gelu_tanh")),
    "model.compile": Word("none", words=("none", "blocks", "model")),
    "model.activation_checkpointing": Word("none", words=("none", "selective", "full")),
    "data.batch_size": count(1, 32),
    "data.global_batch_size": count(1, 256, null=True),
    "data.seq_len": count(1, 128),
    "data.num_samples": count(1, 10000),
    "data.num_workers": Number(2, low=0, high=WORKERS_MAX, whole=True),
    "data.path": Listing(None, True, Text(path=True), alone=True),
    "data.train_path": Listing(None, False, Text(path=True), alone=True),
    "data.val_path": Listing(None, False, Text(path=True), alone=True),
    "data.dtype": Word("uint16", True, ("uint16", "uint32")),
    "data.pattern": Text("*.py"),
    "data.tokenizer": Text("bytes", path=True),
    "data.val_fraction": Number(0.05, low=0, high=1, above=True, below=True),
    "optimizer.lr": Number(3e-4, True, low=0, above=True),
    "optimizer.betas": Listing([0.9, 0.95], item=share(0.9, below=True), length=2),
    "optimizer.eps": Number(1e-8, low=0, above=True),
    "optimizer.weight_decay": Number(0.1, True, low=0),
    "optimizer.fused": Flag(True, True),
    "optimizer.momentum": share(0.95, below=True),
    "optimizer.lr_scaling": Word("none", words=("none", "linear", "sqrt")),
    "optimizer.reference_batch_size": count(1, 32),
    "scheduler.warmup_steps": Either(
        100, True, warmup, "a whole number of steps >= 0, a share of the run below 1, or null"
    ),
    "scheduler.total_steps": count(1, None, null=True),
    "scheduler.start_factor": share(0.1),
    "scheduler.min_factor": share(0.1),
    "scheduler.decay_share": share(0.2, above=True),
    "strategy.name": Word("auto", words=STRATEGIES),
    "strategy.tensor_parallel_size": count(1, 2, null=True),
    "strategy.pipeline_parallel_size": count(1, 2, null=True),
    "strategy.microbatches": count(1, 4, null=True),
    "strategy.schedule": Word("1f1b", words=("gpipe", "1f1b", "interleaved_1f1b")),
    "strategy.timeout_s": Number(1800, low=0, high=INT32_MAX, above=True),
    "strategy.backend": Word(None, True, ("nccl", "gloo", "mpi")),
    "strategy.reshard_after_forward": Flag(True),
    "strategy.accumulate_shards": Flag(False),
    "strategy.cpu_offload": Flag(False),
    "strategy.bucket_cap_mb": Number(25, low=0, high=INT32_MAX, above=True),
    "strategy.gradient_as_bucket_view": Flag(True),
    "strategy.static_graph": Flag(False),
    "strategy.find_unused_parameters": Flag(False),
    "strategy.comm_hook": Word("none", words=("none", "bf16", "fp16", "powersgd")),
    "checkpoint.name": Word("default", words=("default", "every_n_steps", "none")),
    "checkpoint.every_n_steps": count(1, 1000, null=True),
    "checkpoint.keep": count(2, 2),
    "checkpoint.background": Flag(True),
    "checkpoint.monitor": Word("val/loss", words=METRICS[:3]),
    "launcher.max_restarts": count(0, 1),
    "launcher.timeout_s": Number(None, True, low=0, high=INT32_MAX, above=True),
    "trainer.accelerator": Word("auto", words=("auto", "cpu", "gpu", "cuda", "mps", "tpu")),
    "trainer.devices": Either(
        1, False, devices, 'a number >= 1, a list of device numbers, -1 or "auto"'
    ),
    "trainer.num_nodes": count(1, 1),
    "trainer.precision": Word("32-true", words=PRECISIONS, aliases=PRECISION_ALIASES),
    "trainer.max_epochs": count(1, 3, null=True, also=(-1,)),
    "trainer.max_steps": Number(1000, low=1, high=2**40, whole=True, also=(-1,)),
    "trainer.min_epochs": count(0, None, null=True),
    "trainer.min_steps": count(0, None, null=True),
    "trainer.max_time": Either("00:12:00:00", True, duration, "DD:HH:MM:SS, or null"),
    "trainer.accumulate_grad_batches": count(1, 1),
    "trainer.gradient_clip_val": Number(1.0, True, low=0, above=True),
    "trainer.gradient_clip_algorithm": Word("norm", True, ("norm",)),
    "trainer.fast_dev_run": Either(
        True, False, fast_dev_run, "true, false, or a whole number of batches"
    ),
    "trainer.overfit_batches": Either(
        1, False, limit, "a fraction in [0, 1], or a whole number >= 0"
    ),
    "trainer.limit_train_batches": LIMIT,
    "trainer.limit_val_batches": LIMIT,
    "trainer.limit_test_batches": LIMIT,
    "trainer.limit_predict_batches": LIMIT,
    "trainer.val_check_interval": Either(
        1.0, False, interval, "a fraction of an epoch in (0, 1], or optimizer steps >= 1"
    ),
    "trainer.check_val_every_n_epoch": count(1, 1, null=True),
    "trainer.num_sanity_val_steps": count(0, 0, null=True, also=(-1,)),
    "trainer.log_every_n_steps": count(1, 10),
    "trainer.enable_progress_bar": Flag(True, True),
    "trainer.enable_model_summary": Flag(False, True),
    "trainer.deterministic": Flag(True, True, ("warn",)),
    "trainer.benchmark": Flag(True, True),
    "trainer.inference_mode": Flag(True),
    "trainer.detect_anomaly": Flag(False),
    "trainer.sync_batchnorm": Flag(False),
    "trainer.reload_dataloaders_every_n_epochs": count(0, 0),
}

# What is said instead of a rule's own words, where they do not tell the way out.
WORDS = {
    "trainer.max_steps": "must be >= 1, or -1 for no limit together with trainer.max_time"
    " or trainer.max_epochs",
    "trainer.gradient_clip_val": "must be > 0, or null for off",
    "trainer.log_every_n_steps": "must be >= 1; to log nothing: logger=none",
    "checkpoint.keep": "must be >= 2, one file alone is one disk error from nothing",
    "ckpt_path": "remote checkpoints are off; download, check the hash, pass a local path",
}
REMOTE = "ckpt_path"  # its words are for remote values only
# Keys without which nothing runs; the others may be missing from a user's own yaml.
NEEDED = {
    *(k for k in RULES if k.startswith(("trainer.", "strategy.", "checkpoint.", "launcher."))),
    "data.batch_size", "data.global_batch_size", "data.num_workers",
    "optimizer.lr_scaling", "optimizer.reference_batch_size",
    "scheduler.warmup_steps", "scheduler.total_steps", "scheduler.start_factor",
    "scheduler.min_factor", "model.compile", "model.activation_checkpointing",
}  # fmt: skip


def rule_of(key: str) -> Rule | None:
    """The rule of a key; a data set's own arguments follow those of the group."""
    parts = key.split(".")
    if len(parts) == 3 and parts[0] == "data" and parts[1] in ("train", "val", "test"):
        return RULES.get(f"data.{parts[2]}") or RULES.get(f"model.{parts[2]}")
    return RULES.get(key)


def judge(key: str, value: object) -> tuple[str, str, str] | None:
    """(what is wrong, what is allowed, what to try) of one value; None where it is right."""
    rule = rule_of(key)
    found = rule.wrong(value) if rule else None
    if found is None:
        return None
    what, allowed = found.what, found.allowed
    is_range = what.startswith("must be") and key in WORDS
    if is_range or (key == REMOTE and what.startswith("remote")):
        what, allowed = WORDS[key], ""
    if what.startswith(("must be", "too large")):
        allowed = ""  # said already
    return what, allowed, "" if rule.example is None else f"{key}={_typed(rule.example)}"


def check_values(run: Run) -> None:
    """Each value by itself."""
    for key, value in run.nodes.items():
        if key in run.wrong or not (found := judge(key, value)):
            continue
        if key in run.derived and key not in RULES:
            run.wrong.add(key)  # told where it was copied from
            continue
        what, allowed, attempt = found
        run.error(key, what, allowed=allowed, attempt=attempt)
    for key in sorted(NEEDED):
        if not run.has(key) and not run.wrong & {key, key.split(".")[0]}:
            example = RULES[key].example
            run.error(
                key,
                "missing, the run needs it",
                attempt=f"{key}={'null' if example is None else _typed(example)}",
            )


def _typed(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "")
