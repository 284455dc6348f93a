"""What someone may have meant: the nearest name, and names that other projects use."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

# Last part of a key elsewhere (nanoGPT, Hugging Face, other templates) -> our key.
ALIASES = {
    "bs train_batch_size per_device_train_batch_size": "data.batch_size",
    "block_size n_ctx context_length": "model.max_seq_len",
    "n_embd hidden_size embed_dim": "model.d_model",
    "n_head num_heads num_attention_heads": "model.n_heads",
    "n_layer num_layers num_hidden_layers": "model.n_layers",
    "learning_rate": "optimizer.lr",
    "warmup warmup_iters num_warmup_steps": "scheduler.warmup_steps",
    "epochs num_epochs num_train_epochs": "trainer.max_epochs",
    "steps max_iters": "trainer.max_steps",
    "gpus num_gpus num_processes": "trainer.devices",
    "grad_clip max_grad_norm clip_grad_norm": "trainer.gradient_clip_val",
    "gradient_accumulation_steps grad_accum": "trainer.accumulate_grad_batches",
    "dtype": "trainer.precision",
    "ckpt resume resume_from resume_from_checkpoint": "ckpt_path",
}
# What is typed elsewhere -> what to type here, by the first that fits: arguments of Lightning's
# Trainer that other groups set, and habits from lightning-hydra-template.
HABITS = {
    "trainer.logger=*": "logger=csv",
    "trainer.callbacks=*": "callbacks=default",
    "trainer.default_root_dir=*": "run_dir={value}",
    "trainer.enable_checkpointing=*": "checkpoint=none",
    "trainer.strategy=deepspeed*": "strategy=fsdp",
    "trainer.strategy=fsdp*": "strategy=fsdp",
    "trainer.strategy=ddp*": "strategy=ddp",
    "trainer.strategy=*": "strategy=auto",
    "trainer=ddp": "strategy=ddp trainer.devices=4",
    "trainer=ddp_sim": "trainer=cpu trainer.devices=2",
    "debug=fdr": "trainer.fast_dev_run=true",
    "debug=overfit": "trainer.overfit_batches=1",
    "debug=profiler": "profiler=torch",
    "train=false": "task=test",
    "test=false": "task=fit",
    "data.val=null": "trainer.limit_val_batches=0 with any data.val",
    "logger=many_loggers": "logger=[csv,tensorboard]",
    "model.compile=true": "model.compile=model",
    "strategy=dp": "strategy=ddp; DataParallel drives all devices from one Python thread and copies"
    " the weights at every step, which is slower than ddp on any number of them",
    "optimized_metric=*": "objective={value}",
    "task_name=*": "name={value}",
    "paths.data_dir=*": "data.path={value}",
    "paths.*": "output_dir={value}",
    "model.optimizer.*": "optimizer.{leaf}={value}",
    "model.scheduler.*": "scheduler.{leaf}={value}",
    "model.net.*": "model.{leaf}={value}",
}


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name closest to a word; None where none is close."""
    found = get_close_matches(word[:100].lower(), list(map(str, names)), 1, cutoff)
    return found[0] if found else None


def find_alias(key: str, value: str) -> str | None:
    """What to type for a habit of another project; None for what is none."""
    typed, leaf = f"{key}={value.lower()}", key.rpartition(".")[2]
    found = next((words for habit, words in HABITS.items() if fnmatchcase(typed, habit)), None)
    return found and found.format(value=value or "<value>", leaf=leaf)


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that was meant: of another project, of its own group, or of any other."""
    head, _, leaf = key.rpartition(".")
    for names, ours in ALIASES.items():
        if leaf in names.split():
            return ours
    for is_any, cutoff in ((False, 0.6), (True, 0.8)):
        leaves: dict[str, str] = {}
        for name in sorted(known, key=lambda one: (one.count("."), one)):
            group, _, last = name.rpartition(".")
            if is_any or group == head:
                leaves.setdefault(last, name)
        if near := nearest(leaf, leaves, cutoff):
            return leaves[near]
    return None
