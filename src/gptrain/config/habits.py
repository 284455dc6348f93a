"""What users of lightning-hydra-template type, answered by our names.

Edit distance does not find these. They are looked at only once a word was found wrong, so that a
user's own `conf/trainer/ddp.yaml` is taken as it is.
"""

from __future__ import annotations

from gptrain.plan.dims import AXES

# typed -> what to type here; a value of None stands for any.
HABITS: dict[tuple[str, str | None], str] = {
    ("trainer", "ddp"): "strategy=ddp trainer.devices=4",
    ("trainer", "ddp_sim"): "trainer=cpu trainer.devices=2",
    ("trainer", "fsdp"): "strategy=fsdp",
    ("trainer", "mps"): "trainer.accelerator=mps",
    ("trainer", "tpu"): "trainer.accelerator=tpu",
    ("debug", "fdr"): "trainer.fast_dev_run=true",
    ("debug", "default"): "trainer.fast_dev_run=true",
    ("debug", "limit"): "trainer.limit_train_batches=10",
    ("debug", "overfit"): "trainer.overfit_batches=1",
    ("debug", "profiler"): "profiler=torch",
    ("train", "true"): "task=fit",
    ("train", "false"): "task=test",
    ("test", "true"): "task=test",
    ("test", "false"): "task=fit",
    ("optimized_metric", None): "objective={value}",
    ("task_name", None): "name={value}",
    ("tags", None): "name=<name>",
    ("extras", None): "print_config=true",
    ("paths.output_dir", None): "output_dir={value}",
    ("paths.log_dir", None): "output_dir={value}",
    ("paths.root_dir", None): "output_dir={value}",
    ("paths.data_dir", None): "data.path={value}",
    ("paths", None): "output_dir=<folder>",
    ("hydra.launcher", None): "hydra/launcher=basic",
    ("logger", "many_loggers"): "logger=[csv,tensorboard]",
    ("callbacks", "early_stopping"): "callbacks=default",
    ("callbacks", "model_checkpoint"): "checkpoint=default",
    ("callbacks.model_checkpoint", None): "checkpoint.monitor=val/loss",
    ("callbacks.early_stopping", None): "callbacks=default",
    ("model.compile", "true"): "model.compile=model",
    ("model.compile", "false"): "model.compile=none",
}
# How a name of Lightning's strategies begins -> the choice that does the same here: our own names,
# the longer of two that begin alike first, and two of its own.
LIGHTNING_STRATEGIES = {name: name for name in sorted(AXES, key=len, reverse=True)} | {
    "deepspeed": "fsdp",
    "modelparallel": "fsdp_tensor_parallel",
}
# Prefix of a key there -> prefix here.
MOVED = {
    "model.optimizer": "optimizer",
    "model.scheduler": "scheduler",
    "model.net": "model",
    "model.model": "model",
    "paths": "output_dir",
    "trainer.optimizer": "optimizer",
}


def answer_habit(key: str, value: str) -> str | None:
    """What to type instead; None for what is no habit of that template."""
    lowered = value.lower()
    for wanted in (lowered, None):
        if (key, wanted) in HABITS:
            return HABITS[key, wanted].format(value=value or "<value>")
    for there, here in MOVED.items():
        if key.startswith(f"{there}."):
            leaf = key.removeprefix(f"{there}.")
            return f"{here}.{leaf}={value}" if here != "output_dir" else f"{here}={value}"
    if key == "trainer.strategy":
        near = (ours for word, ours in LIGHTNING_STRATEGIES.items() if lowered.startswith(word))
        return f"strategy={next(near, 'auto')}"
    return None
