"""What someone may have meant: the nearest name, and names that other projects use."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from gptrain.plan.dims import AXES

# Last part of a key elsewhere (nanoGPT, Hugging Face, other templates) -> our key.
ALIASES = {
    "batch bs train_batch_size per_device_train_batch_size": "data.batch_size",
    "block_size n_ctx context_length": "model.max_seq_len",
    "n_embd hidden_size embed_dim": "model.d_model",
    "n_head num_heads nhead num_attention_heads": "model.n_heads",
    "n_layer num_layers num_hidden_layers": "model.n_layers",
    "learning_rate": "optimizer.lr",
    "beta1 beta2": "optimizer.betas",
    "wd": "optimizer.weight_decay",
    "warmup warmup_iters num_warmup_steps": "scheduler.warmup_steps",
    "epochs num_epochs num_train_epochs": "trainer.max_epochs",
    "steps max_iters": "trainer.max_steps",
    "gpus num_gpus n_gpus num_processes": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "grad_clip max_grad_norm clip_grad_norm": "trainer.gradient_clip_val",
    "gradient_accumulation_steps grad_accum": "trainer.accumulate_grad_batches",
    "eval_interval": "trainer.val_check_interval",
    "log_interval": "trainer.log_every_n_steps",
    "dtype": "trainer.precision",
    "tp": "strategy.tensor_parallel_size",
    "pp": "strategy.pipeline_parallel_size",
    "ckpt resume resume_from resume_from_checkpoint checkpoint_path": "ckpt_path",
    "out_dir save_dir": "run_dir",
}
# A whole override -> what to type: arguments of Lightning's Trainer that other keys set, and habits
# from lightning-hydra-template. A key that ends in a dot stands for all below it.
HABITS = {
    "trainer.logger": "logger=csv",
    "trainer.callbacks": "callbacks=default",
    "trainer.profiler": "profiler=simple",
    "trainer.default_root_dir": "run_dir=outputs/mine",
    "trainer.enable_checkpointing": "checkpoint=none",
    "trainer=ddp": "strategy=ddp trainer.devices=4",
    "trainer=ddp_sim": "trainer=cpu trainer.devices=2",
    "trainer=mps": "trainer.accelerator=mps",
    "debug=fdr": "trainer.fast_dev_run=true",
    "debug=limit": "trainer.limit_train_batches=10",
    "debug=overfit": "trainer.overfit_batches=1",
    "debug=profiler": "profiler=torch",
    "train=false": "task=test",
    "test=false": "task=fit",
    "data.val=null": "trainer.limit_val_batches=0 with any data.val",
    "logger=many_loggers": "logger=[csv,tensorboard]",
    "callbacks=model_checkpoint": "checkpoint=default",
    "model.compile=true": "model.compile=model",
    "strategy=dp": "strategy=ddp; DataParallel drives all devices from one Python thread and copies"
    " the weights at every step, which is slower than ddp on any number of them",
    "optimized_metric": "objective={value}",
    "task_name": "name={value}",
    "paths.data_dir": "data.path={value}",
    "paths.": "output_dir={value}",
    "model.optimizer.": "optimizer.{leaf}={value}",
    "model.scheduler.": "scheduler.{leaf}={value}",
    "model.net.": "model.{leaf}={value}",
}
LIGHTNING = {"deepspeed": "fsdp", "modelparallel": "fsdp_tensor_parallel"}  # how its names begin


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name closest to a word; None where none is close."""
    found = get_close_matches(word[:100].lower(), list(map(str, names)), n=1)
    return found[0] if found else None


def find_alias(key: str, value: str) -> str | None:
    """What to type for a habit of another project; None for what is none."""
    if key == "trainer.strategy":
        ours = {name: name for name in sorted(AXES, key=len, reverse=True)} | LIGHTNING
        meant = (ours[word] for word in ours if value.lower().startswith(word))
        return f"strategy={next(meant, 'auto')}"
    head, _, leaf = key.rpartition(".")
    for typed in (f"{key}={value.lower()}", key, f"{head}."):
        if typed in HABITS:
            return HABITS[typed].format(value=value or "<value>", leaf=leaf)
    return None


def nearest_key(key: str, known: set[str]) -> str | None:
    """The known key that was meant: of another project, of another group, or misspelt."""
    head, _, leaf = key.rpartition(".")
    for names, ours in ALIASES.items():
        if leaf in names.split():
            return ours
    for group in (head, None):  # of its own group first
        leaves: dict[str, str] = {}
        for name in sorted(known):
            place, _, last = name.rpartition(".")
            if group in (None, place):
                leaves.setdefault(last, name)
        if near := leaf if leaf in leaves else nearest(leaf, leaves):
            return leaves[near]
    return nearest(key, {name.split(".")[0] for name in known})
