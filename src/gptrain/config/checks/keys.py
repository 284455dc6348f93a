"""Keys that are not ours: added by `+` or by a yaml, deleted, or of another project's habit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from gptrain.config.checks.run import Run
from gptrain.config.checks.values import RULES
from gptrain.config.names import nearest_key
from gptrain.config.schema import RunConfig

# Arguments of Lightning's Trainer that are not keys of its group, and what sets them instead.
SET_ELSEWHERE = {
    "strategy": "strategy=ddp",
    "logger": "logger=csv",
    "callbacks": "callbacks=default",
    "profiler": "profiler=simple",
    "plugins": "strategy and trainer.precision",
    "default_root_dir": "run_dir=outputs/mine",
    "enable_checkpointing": "checkpoint=none",
    "use_distributed_sampler": "nothing, the data order is ours and exact",
    "barebones": "logger=none callbacks=none checkpoint=none",
    "resume_from_checkpoint": "ckpt_path=last",
    "model_registry": "checkpoint=default",
    "enable_autolog_hparams": "logger=none",
}
TYPED = ("strategy", "checkpoint", "launcher")
GROUPS = ("model", "data", "optimizer", "scheduler", "strategy", "trainer", "checkpoint")
OPEN = ("callbacks", "logger")  # mappings of name -> node with a _target_
# Data sets that nothing runs without -> (why, what to try).
NEEDED_DATA = {
    "data.train": ("every run needs it", "data=<choice>"),
    "data.val": ("every run validates", "trainer.limit_val_batches=0 with any data.val"),
}
LIGHTNING_TRAINER = "lightning.pytorch.Trainer"


def check_keys(run: Run) -> None:
    """Each key is one that something reads."""
    root = {item.name for item in fields(run.schema)}
    for key in run.values:
        if key not in root:
            unknown(run, key)
    for group in (*GROUPS, "callbacks", "logger", "profiler", "launcher"):
        value = run.values.get(group)
        if not isinstance(value, dict):
            missing = group not in run.values
            wrong = "missing, the run needs it" if missing else "not a group of keys"
            run.error(group, wrong, attempt="" if group == "launcher" else f"{group}=<choice>")
            continue
        if value == {} and group in ("data", "trainer"):
            run.error(group, "missing, the run needs it", value=None, attempt=f"{group}=<choice>")
    for item in fields(run.schema):
        if item.name not in run.values and item.name not in run.wrong:
            run.error(item.name, "missing, the run needs it", attempt=f"{item.name}=<value>")
    for group in TYPED:
        for key in run.get(group) or {}:
            if f"{group}.{key}" not in RULES:
                unknown(run, f"{group}.{key}")
    trainer = run.get("trainer") or {}
    if trainer.get("_target_") == LIGHTNING_TRAINER:
        for key in trainer:
            if key != "_target_" and f"trainer.{key}" not in RULES:
                unknown(run, f"trainer.{key}")
    for group in OPEN:
        for name, node in (run.get(group) or {}).items():
            if node is not None and (not isinstance(node, dict) or "_target_" not in node):
                run.error(
                    f"{group}.{name}",
                    "no _target_",
                    allowed="a mapping with a _target_, or null",
                    attempt=f"'~{group}.{name}'",
                )
    for group in ("model", "optimizer", "scheduler", "trainer", "data.train", "data.val"):
        node = run.get(group)
        if isinstance(node, dict) and node and "_target_" not in node:
            run.error(f"{group}._target_", "missing, nothing says what to build")
    for key, (why, attempt) in NEEDED_DATA.items():
        node = run.get(key)
        if run.get("data") and key not in run.wrong and (not node or not isinstance(node, dict)):
            wrong = "not a mapping with a _target_" if node else f"missing, {why}"
            run.error(key, wrong, attempt=attempt)
    if run.get("profiler") and "_target_" not in run.get("profiler"):
        run.error("profiler", "no _target_", attempt="profiler=simple")


def unknown(run: Run, key: str) -> None:
    """Adds the problem of a key that nothing reads."""
    wrong, attempt = answer_unknown(key, known_keys())
    run.error(key, wrong, attempt=attempt)


def answer_unknown(key: str, known: set[str]) -> tuple[str, str]:
    """(what is wrong, what to try) for a key that does not exist."""
    head, _, leaf = key.rpartition(".")
    if head == "trainer" and leaf in SET_ELSEWHERE:
        return "no key of the trainer group, it is set elsewhere", SET_ELSEWHERE[leaf]
    near = nearest_key(key, known - {key})
    return "unknown key" + (f", did you mean {near}?" if near else ""), "" if near else "--help"


def known_keys() -> set[str]:
    """Keys of the schema and of the shipped groups."""
    keys = set(RULES)
    for item in fields(RunConfig):
        keys.add(item.name)
        if isinstance(item.default_factory, type) and is_dataclass(item.default_factory):
            keys |= {f"{item.name}.{inner.name}" for inner in fields(item.default_factory)}
    return keys
