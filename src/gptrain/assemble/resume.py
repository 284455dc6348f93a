"""Which checkpoint is meant, and whether a run that goes on from it is still the same run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from gptrain.assemble.lengths import batch_of
from gptrain.assemble.weights import find_weights, named_source
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import Checkpoint, read_manifest
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, FOLDER_UNUSABLE, ConfigError, ConfigIssue
from gptrain.core.lengths import RunLengths
from gptrain.core.schema import RunConfig
from gptrain.core.shell import command, option
from gptrain.core.small_files import flatten
from gptrain.core.strategies import STRATEGIES, parallel_dims

log = logging.getLogger(__name__)

SPELT_OUT = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
# Groups of which every key decides what is computed, and the few that do not.
DECISIVE = ("model", "module", "data", "optimizer", "scheduler")
INDIFFERENT = {
    "data.num_workers",
    "data.batch_size",  # may change where data.global_batch_size stays
    "data.global_batch_size",  # the number that comes out counts, not how it was asked for
    "strategy.timeout_s",
    "strategy.backend",
    "data.val.seed",  # follows from seed
    "model.compile",
    "model.activation_checkpointing",
}
# What a manifest keeps besides, see check_data and keep_warmup.
OF_THE_START = ("data", "warmup_steps")
# Of a mixture: what data.parts says.
OF_PARTS = tuple(
    f"data.{split}.{key}." for split in ("train", "val") for key in ("parts", "weights")
)


# Which checkpoint


def find_checkpoint(cfg: RunConfig, lock: RunLock, world_size: int) -> Path | None:
    """The folder that ckpt_path names, every byte of it verified; None for a fresh run.

    Call it in one process, under the run lock, before any rank starts.

    Args:
        lock: of the run folder; checkpoints of another run are not taken for its own.
    Raises: ConfigError: 65 damaged, 66 not found, 2 another run than the one that was saved, 73 a
        fresh run, or an evaluation, where one has been.
    """
    store = CheckpointStore(Path(cfg.run_dir) / CHECKPOINTS_NAME, lock.run_id)
    if cfg.task == "fit":
        found = _find_start(cfg, store, lock)
    else:
        if store.folder.is_dir():
            message = "holds a trained run"
            hint = f"{option('from_run', cfg.run_dir)} in another run_dir"
            about = "run_dir", cfg.run_dir, message
            raise ConfigError.of(*about, hint=hint, code=FOLDER_UNUSABLE)
        found = find_trained(cfg) if cfg.ckpt_path or cfg.from_run else None
    if found is None:
        return None
    if isinstance(found, Path):
        message = "a file of weights: no run can go on exactly"
        hint = option("init_from", cfg.ckpt_path)
        raise ConfigError.of("ckpt_path", cfg.ckpt_path, message, hint=hint, code=BAD_DATA)
    batch = batch_of(cfg, parallel_dims(cfg.strategy, world_size).data)
    saved, size = found.manifest["config"], batch.global_batch_size
    if problems := differences(cfg, saved, size):
        raise ConfigError(problems)
    if cfg.max_tokens and cfg.task == "fit" and saved["data.global_batch_size"] != size:
        message, hint = "counts steps of one size", "trainer.max_steps=<n> max_tokens=null"
        raise ConfigError.of("max_tokens", cfg.max_tokens, message, hint=hint)
    verb = "resume" if cfg.task == "fit" else cfg.task
    log.info(labels.line(verb, f"from step {found.step}: {found.path}"))
    return found.path


def _find_start(cfg: RunConfig, store: CheckpointStore, lock: RunLock) -> Checkpoint | Path | None:
    """What a training goes on from; None where it begins."""
    asked = cfg.ckpt_path
    if asked is None and not cfg.trainer.fast_dev_run and (steps := store.steps()):
        message = f"holds a run that was saved at step {steps[-1]}; a fresh one would mix with it"
        hint = "ckpt_path=last to go on with it, or another run_dir"
        code = FOLDER_UNUSABLE
        raise ConfigError.of("run_dir", cfg.run_dir, message, hint=hint, code=code)
    if (url := cfg.checkpoint.mirror) and not cfg.trainer.fast_dev_run:
        Mirror(url).join(store, lock, restore=asked == "last" and not store.steps())
    found, monitor = None, cfg.checkpoint.monitor
    with named_source("ckpt_path", asked or ""):
        if asked == "last":
            store.clean()
            found = store.newest_good()
        elif asked == "best":
            found = store.best(monitor, cfg.checkpoint.mode)
            if found is None:
                raise FileNotFoundError(f"no checkpoint with {monitor} in {store.folder}")
        elif asked:
            found = find_weights(asked, "last")
    if found is None and asked:
        text = f"from the beginning: {store.folder} holds no checkpoint yet"
        log.info(labels.line("start", text))
    return found


def find_trained(cfg: RunConfig) -> Checkpoint | Path:
    """What an evaluation or an export reads: what ckpt_path names, or the best of a run.

    `best` and `last` are those of from_run, or of this run's own folder.

    Raises: ConfigError with code 65 or 66.
    """
    asked, which = cfg.ckpt_path, "last" if cfg.ckpt_path == "last" else "best"
    source = cfg.from_run or cfg.run_dir if asked in (None, "best", "last") else asked
    key = "from_run" if asked is None else "ckpt_path"
    with named_source(key, cfg.value_of(key)):
        return find_weights(source, which, cfg.checkpoint)


# The same run


def identity(cfg: RunConfig, global_batch_size: int) -> dict[str, Any]:
    """Flat key -> value of all that a config says and that must not change for an exact resume.

    Keys inside data.train and data.val that only repeat a key of data or model are left out.

    Args:
        global_batch_size: sequences per optimizer step, however they are divided.
    """
    precision, plain = str(cfg.trainer.precision), cfg.plain()
    facts = {
        "seed": cfg.seed,
        "data.global_batch_size": global_batch_size,
        "trainer.gradient_clip_val": cfg.trainer.gradient_clip_val or None,
        "trainer.precision": SPELT_OUT.get(precision, precision),
    }
    row = STRATEGIES.get(cfg.strategy.name)  # of "auto" none
    for group in DECISIVE if row is None or row.is_exact else (*DECISIVE, "strategy"):
        node = plain[group]
        facts |= {
            key: value
            for key, value in flatten(node, group).items()
            if key not in INDIFFERENT and not key.endswith(".cache_dir")
        }
    return {key: value for key, value in facts.items() if not _repeats(key, value, facts)}


def differences(cfg: RunConfig, saved: dict[str, Any], global_batch_size: int) -> list[ConfigIssue]:
    """One problem per key that differs from the saved run's and was not allowed to.

    A key that the saved run lacked is younger than that run: it is a change only where it was typed
    now, and else stands at its default. An evaluation needs the same net, and nothing else.
    """
    now = identity(cfg, global_batch_size)
    words = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    typed = [word.lstrip("+").partition("=")[0] for word in words]
    part = "" if cfg.task == "fit" else "model."
    return [
        _changed(key, saved.get(key), now.get(key))
        for key in sorted(saved.keys() | now.keys())
        if key.startswith(part)
        and key not in OF_THE_START
        and saved.get(key) != now.get(key)
        and (key in saved or covers(typed, key))
        and not covers(cfg.allow_changes, key)
    ]


def check_data(cfg: RunConfig, checkpoint: Path | None, fingerprint: str | None) -> None:
    """Raises ConfigError where the content of the training data is not what it was."""
    if checkpoint is None or cfg.task != "fit" or covers(cfg.allow_changes, "data"):
        return
    saved = read_manifest(checkpoint)["config"].get("data")
    if saved != fingerprint:
        raise ConfigError([_changed("data", saved, fingerprint)])


def keep_warmup(cfg: RunConfig, lengths: RunLengths, saved: Mapping[str, Any]) -> RunLengths:
    """The lengths with the warm-up of the run's first start, as long as the same is asked for.

    One that follows from the run's length would be another in a run that goes on to another end.

    Args:
        saved: what the manifest keeps of the run.
    """
    asked, first = cfg.scheduler.warmup_steps, saved.get("warmup_steps")
    is_other = asked != saved.get("scheduler.warmup_steps") or cfg.scheduler.warmup_tokens
    return lengths if first is None or is_other else replace(lengths, warmup_steps=first)


def changed_options(cfg: RunConfig) -> tuple[str, ...]:
    """Options of the optimizer that allow_changes names: a resume gives them their new value."""
    changed = (
        key for key in cfg.optimizer.plain() if covers(cfg.allow_changes, f"optimizer.{key}")
    )
    return tuple("lr" if key.endswith("_lr") else key for key in changed)  # of a group: its lr


def covers(names: Iterable[str], key: str) -> bool:
    """Whether one of the names is the key, or a group that holds it."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _changed(key: str, saved: object, now: object) -> ConfigIssue:
    hint = f"that value, or {command(f'allow_changes=[{key}]')}"
    return ConfigIssue(key, now, f"the checkpoint was made with {saved}", hint=hint)


def _repeats(key: str, value: Any, facts: dict[str, Any]) -> bool:
    if key.startswith(OF_PARTS):
        return any(other.startswith("data.parts.") for other in facts)
    part, _, name = key.rpartition(".")
    group, _, split = part.rpartition(".")
    sources = (f"{group}.{name}", f"model.{name}", name)
    is_part = group.partition(".")[0] == "data" and split in ("train", "val", "test")
    return is_part and any(facts.get(source) == value for source in sources)
