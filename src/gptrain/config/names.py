"""What someone may have meant: the nearest name, and names that other projects use."""

from __future__ import annotations

from collections.abc import Iterable

# Last part of a key elsewhere (nanoGPT, Hugging Face, lightning-hydra-template) -> our key.
ELSEWHERE = {
    "batch": "data.batch_size",
    "bs": "data.batch_size",
    "train_batch_size": "data.batch_size",
    "per_device_train_batch_size": "data.batch_size",
    "block_size": "model.max_seq_len",
    "n_ctx": "model.max_seq_len",
    "context_length": "model.max_seq_len",
    "n_embd": "model.d_model",
    "hidden_size": "model.d_model",
    "embed_dim": "model.d_model",
    "n_head": "model.n_heads",
    "num_heads": "model.n_heads",
    "nhead": "model.n_heads",
    "num_attention_heads": "model.n_heads",
    "n_layer": "model.n_layers",
    "num_layers": "model.n_layers",
    "num_hidden_layers": "model.n_layers",
    "learning_rate": "optimizer.lr",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "wd": "optimizer.weight_decay",
    "warmup": "scheduler.warmup_steps",
    "warmup_iters": "scheduler.warmup_steps",
    "num_warmup_steps": "scheduler.warmup_steps",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    "max_iters": "trainer.max_steps",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "n_gpus": "trainer.devices",
    "num_processes": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "grad_clip": "trainer.gradient_clip_val",
    "max_grad_norm": "trainer.gradient_clip_val",
    "clip_grad_norm": "trainer.gradient_clip_val",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "grad_accum": "trainer.accumulate_grad_batches",
    "eval_interval": "trainer.val_check_interval",
    "log_interval": "trainer.log_every_n_steps",
    "dtype": "trainer.precision",
    "tp": "strategy.tensor_parallel_size",
    "pp": "strategy.pipeline_parallel_size",
    "ckpt": "ckpt_path",
    "resume": "ckpt_path",
    "resume_from": "ckpt_path",
    "resume_from_checkpoint": "ckpt_path",
    "checkpoint_path": "ckpt_path",
    "out_dir": "run_dir",
    "save_dir": "run_dir",
}


def distance(left: str, right: str) -> int:
    """Characters to insert, delete, replace, or swap with their neighbour, to turn one into other.

    Source: optimal string alignment, Damerau 1964, doi:10.1145/363958.363994
    """
    before, row = [], list(range(len(right) + 1))
    for i, char in enumerate(left, 1):
        last, before, row = before, row, [i]
        for j, other in enumerate(right, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (char != other))
            if i > 1 and j > 1 and char == right[j - 2] and left[i - 2] == other:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name closest to a word; None where a third of the longer of both must change."""
    word = word[:100].lower()
    scored = [(distance(word, name.lower()) / max(len(word), len(name)), name) for name in names]
    best = min(scored, default=(1.0, None))
    return best[1] if best[0] <= 1 / 3 else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known key that was meant: of another group, of another project, or misspelt."""
    known = list(known)
    head, _, leaf = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == head]
    found = nearest(leaf, siblings) if head else None
    if found:
        return f"{head}.{found}"
    groups = {name.partition(".")[0] for name in known if "." in name}
    group = nearest(head.partition(".")[0], groups - {head}) if head else None
    if group and group != head.partition(".")[0]:
        return nearest_key(f"{group}.{leaf}", known) or group
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if same_leaf:
        return min(same_leaf, key=lambda name: (name.count("."), distance(key, name), name))
    if leaf in ELSEWHERE:
        return ELSEWHERE[leaf]
    # By the last part, so that a long common beginning is no likeness.
    by_leaf: dict[str, str] = {}
    for name in sorted(known, key=lambda name: (-name.count("."), -distance(key, name))):
        by_leaf[name.rpartition(".")[2]] = name
    found = nearest(leaf, by_leaf)
    return by_leaf[found] if found else None
