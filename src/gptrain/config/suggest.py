"""What someone may have meant: the nearest name, and habits from other projects."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

# What is typed elsewhere -> what to type here, by the first that fits.
HABITS = {
    # Arguments of Lightning's Trainer that other groups set.
    "trainer.logger=*": "logger=csv",
    "trainer.callbacks=*": "callbacks=default",
    "trainer.default_root_dir=*": "run_dir={value}",
    "trainer.enable_checkpointing=*": "checkpoint=none",
    "trainer.strategy=ddp*": "strategy=ddp",
    "trainer.strategy=auto": "strategy=auto",
    "trainer.strategy=*": "strategy=fsdp",
    # lightning-hydra-template
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
    # nanoGPT, Hugging Face
    "bs=*": "data.batch_size={value}",
    "data.bs=*": "data.batch_size={value}",
    "*train_batch_size=*": "data.batch_size={value}",
    "*block_size=*": "model.max_seq_len={value}",
    "*context_length=*": "model.max_seq_len={value}",
    "*n_ctx=*": "model.max_seq_len={value}",
    "*n_embd=*": "model.d_model={value}",
    "*hidden_size=*": "model.d_model={value}",
    "*num_attention_heads=*": "model.n_heads={value}",
    "*num_hidden_layers=*": "model.n_layers={value}",
    "*learning_rate=*": "optimizer.lr={value}",
    "warmup=*": "scheduler.warmup_steps={value}",
    "epochs=*": "trainer.max_epochs={value}",
    "*num_train_epochs=*": "trainer.max_epochs={value}",
    "steps=*": "trainer.max_steps={value}",
    "trainer.steps=*": "trainer.max_steps={value}",
    "*max_iters=*": "trainer.max_steps={value}",
    "*gpus=*": "trainer.devices={value}",
    "*grad_clip=*": "trainer.gradient_clip_val={value}",
    "*grad_norm=*": "trainer.gradient_clip_val={value}",
    "*grad*accum*=*": "trainer.accumulate_grad_batches={value}",
    "dtype=*": "trainer.precision={value}",
    "*resume*=*": "ckpt_path={value}",
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
    """The known key that was meant, of its own group or of any other."""
    group, _, leaf = key.rpartition(".")
    every = sorted(known, key=lambda name: (name.count("."), name), reverse=True)
    own = [name for name in every if name.rpartition(".")[0] == group]
    for names, cutoff in ((own, 0.6), (every, 0.8)):
        leaves = {name.rpartition(".")[2]: name for name in names}  # of several the shortest
        if near := nearest(leaf, leaves, cutoff):
            return leaves[near]
    return None
