"""Find the checkpoint that a run resumes from, and check that the run is still the same."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.load import find_trained, find_weights
from gptrain.checkpoints.lock import RunLock
from gptrain.checkpoints.manifest import read_manifest, step_of
from gptrain.checkpoints.mirror import Mirror
from gptrain.checkpoints.status import CHECKPOINTS_NAME, RESULT_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, FOLDER_UNUSABLE, ConfigError, ConfigIssue, show
from gptrain.core.lengths import RunLengths, plan_batch
from gptrain.core.schema import RunConfig, SampleTextConfig
from gptrain.core.shell import command, option
from gptrain.core.small_files import flatten
from gptrain.core.strategies import parallel_dims
from gptrain.core.value_types import KeepsResult, Section
from gptrain.parallel.mesh import from_rank_0
from gptrain.runtime.devices import find_devices

log = logging.getLogger(__name__)

# Groups whose keys change what is computed, except those whose type has the mark KeepsResult. A
# resume must not change them without permission.
_DECISIVE = ("model", "module", "data", "optimizer", "scheduler")
# Entries of a manifest that are no config keys, see continue_run.
_EXTRA_ENTRIES = ("data", "warmup_steps")


# Finding the checkpoint


def find_checkpoint(cfg: RunConfig, lock: RunLock) -> Path | None:
    """Return the folder of the checkpoint that a run begins with, with every byte verified.

    `ckpt_path` names it, for an evaluation also `from_run`. Call the function on rank 0 only, under
    the run lock, before the rank joins the others. Damaged checkpoints of the run folder may be
    renamed, and checkpoints may be fetched from the mirror.

    Args:
        lock: Lock of the run folder, which the caller holds. Its `run_id` is that of the run.

    Returns:
        The folder. None for a fit that starts at step 0, also with ckpt_path=last if nothing was
        saved yet, and for an evaluation of the initial weights or of those of `init_from`.

    Raises:
        ConfigError: If the checkpoint is damaged or a mere file of weights (exit code 65), does not
            exist (66) or was made with another config (2), or if the folder holds a run and none is
            to be resumed (73), or if the mirror cannot be used.
        OSError: If a folder cannot be read, or its network file system does not answer.
    """
    store = CheckpointStore(Path(cfg.run_dir) / CHECKPOINTS_NAME, lock.run_id)
    if cfg.task == "fit":
        checkpoint = _find_start(cfg, store, lock)
    else:
        if store.folder.is_dir():
            message = "holds a trained run"
            hint = f"{option('from_run', cfg.run_dir)} in another run_dir"
            raise ConfigError.of("run_dir", cfg.run_dir, message, hint=hint, code=FOLDER_UNUSABLE)
        checkpoint = find_trained(cfg) if cfg.ckpt_path or cfg.from_run else None
    if checkpoint is None:
        return None
    # A folder of Lightning's ModelCheckpoint belongs to no run, as a file of weights.
    if not checkpoint.is_dir() or not (manifest := read_manifest(checkpoint)).run_id:
        message = "a file of weights, from which no run can be resumed exactly"
        hint = option("init_from", cfg.ckpt_path)
        raise ConfigError.of("ckpt_path", cfg.ckpt_path, message, hint=hint, code=BAD_DATA)
    if problems := _differences(cfg, manifest.config):
        raise ConfigError(problems)
    verb = "resume" if cfg.task == "fit" else cfg.task
    log.info(labels.line(verb, f"from step {manifest.step}: {checkpoint}"))
    return checkpoint


def _find_start(cfg: RunConfig, store: CheckpointStore, lock: RunLock) -> Path | None:
    """Return the checkpoint that a training resumes from, or None for a start at step 0."""
    requested, is_done = cfg.ckpt_path, (Path(cfg.run_dir) / RESULT_NAME).exists()
    if requested is None and (is_done or (store.paths() and not cfg.trainer.fast_dev_run)):
        message = "already holds a run, and a new run would mix with it"
        hint = "ckpt_path=last to resume it, or another run_dir"
        raise ConfigError.of("run_dir", cfg.run_dir, message, hint=hint, code=FOLDER_UNUSABLE)
    store.clean()
    if (url := cfg.checkpoint.mirror) and not cfg.trainer.fast_dev_run:
        Mirror(url).join(store, lock, restore=requested == "last" and not store.paths())
    checkpoint, monitor = None, cfg.checkpoint.monitor
    with as_config_errors(cfg, "ckpt_path", BAD_DATA):
        if requested == "last":
            if checkpoint := store.newest_intact():
                store.set_aside_after(step_of(checkpoint), "damaged")
        elif requested == "best":
            checkpoint = store.best(monitor, cfg.checkpoint.mode)
            if checkpoint is None:
                store.newest_intact()  # raises if all are damaged
                raise FileNotFoundError(f"no checkpoint with {monitor} in {store.folder}")
        elif requested:
            checkpoint = find_weights(requested, "last")
    if checkpoint is None and requested:
        text = f"from the beginning: {store.folder} holds no checkpoint yet"
        log.info(labels.line("start", text))
    return checkpoint


# Comparing with the saved run


def identity(cfg: RunConfig) -> dict[str, Any]:
    """Return dotted key -> value for the keys that must not change for an exact resume.

    They are the keys that decide the result: those of the groups model, module, data, optimizer and
    scheduler, one entry for each callback, the seed, the global batch size, the precision and the
    clipping of gradients. Keys with the mark KeepsResult, such as `data.num_workers`, keys that
    only repeat another key, and callbacks that print sampled text are left out.
    """
    devices = find_devices(cfg)
    dims = parallel_dims(cfg.strategy, devices.world_size, devices.n_nodes)
    facts: dict[str, Any] = {
        "seed": cfg.seed,
        "data.global_batch_size": plan_batch(cfg, dims.data).global_batch_size,
        "trainer.gradient_clip_val": cfg.trainer.gradient_clip_val or None,
        "trainer.precision": cfg.trainer.precision,
    }
    for group in _DECISIVE:
        section: Section = getattr(cfg, group)
        fields = type(section).model_fields.items()
        keeping = {key for key, field in fields if KeepsResult in field.metadata}
        facts |= flatten(section.plain(exclude=keeping), group)
    for name, callback in cfg.callbacks.items():
        if callback and not isinstance(callback, SampleTextConfig):
            facts[f"callbacks.{name}"] = json.dumps(callback.plain(), default=str)
    return {key: value for key, value in facts.items() if not _follows(key, value, facts)}


def _differences(cfg: RunConfig, saved: dict[str, Any]) -> list[ConfigIssue]:
    """Return an issue for each key that differs from the saved run and is not in allow_changes.

    `saved` is what `identity` returned for the saved run. An evaluation compares only the model
    group.
    """
    now = identity(_keep_precision(cfg, saved))
    part = "" if cfg.task == "fit" else "model."
    # The state of a torch schedule holds its options and replaces those of the config.
    target = cfg.scheduler.target
    is_fixed = target.startswith("torch.") and target == saved.get("scheduler._target_")
    allowed = [n for n in cfg.allow_changes if not (is_fixed and n.startswith("scheduler"))]
    differing = [key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key)]
    issues = [
        _changed(key, saved.get(key), now.get(key))
        for key in sorted(differing)
        if key.startswith(part) and key not in _EXTRA_ENTRIES and not _covers(allowed, key)
    ]
    is_by_epochs = cfg.trainer.max_steps == -1 and not cfg.trainer.max_time
    resized = {"data.global_batch_size", "data.seq_len"}.intersection(differing)
    if resized and cfg.task == "fit" and (cfg.max_tokens or is_by_epochs):
        key = "max_tokens" if cfg.max_tokens else "trainer.max_epochs"
        text = f"needs steps of one size, and {min(resized)} has changed"
        hint = "trainer.max_steps=<n> max_tokens=null"
        issues.append(ConfigIssue(key, cfg.value_of(key), text, hint))
    return issues


def continue_run(
    cfg: RunConfig, lengths: RunLengths, train: Any, saved: Mapping[str, Any]
) -> tuple[RunConfig, RunLengths]:
    """Return config and lengths of a resumed run, with what its first start has resolved.

    A precision of "auto" is that of the first start. So is the number of warm-up steps, unless
    `scheduler.warmup_steps` has changed or `scheduler.warmup_tokens` is given.

    Args:
        train: Training set. Its attribute `fingerprint` is compared, or None if it has none.
        saved: Entry `config` of the checkpoint's manifest.

    Raises:
        ConfigError: If the training data are not those of the first start, and `allow_changes`
            does not have `data`.
    """
    fingerprint = getattr(train, "fingerprint", None)
    if saved.get("data") != fingerprint and not _covers(cfg.allow_changes, "data"):
        raise ConfigError([_changed("data", saved.get("data"), fingerprint)])
    is_same = cfg.scheduler.warmup_steps == saved.get("scheduler.warmup_steps")
    if is_same and not cfg.scheduler.warmup_tokens:
        lengths = replace(lengths, warmup_steps=saved.get("warmup_steps"))
    return _keep_precision(cfg, saved), lengths


def check_ranks(cfg: RunConfig, *datasets: Any) -> None:
    """Check that this rank has the `identity` and the data of rank 0. Collective.

    A node may have another command, other files in conf/ or another corpus, with which its ranks
    would train. Of a dataset the attribute `fingerprint` is compared, if it has one; its files may
    have other paths.

    Raises:
        ConfigError: On a rank that differs, about the first key with another value.
    """
    own = identity(cfg) | {"data": [getattr(data, "fingerprint", None) for data in datasets]}
    first = from_rank_0(own)
    for key in own | first:
        if own.get(key) != first.get(key) and not key.endswith("path"):
            raise ConfigError.of(key, own.get(key), f"rank 0 has {show(first.get(key))}")


def _keep_precision(cfg: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """Return the config, with the precision of the run's first start in place of "auto"."""
    if cfg.trainer.precision != "auto":
        return cfg
    return cfg.changed({"trainer.precision": saved["trainer.precision"]})


def _covers(names: Iterable[str], key: str) -> bool:
    """Return whether one of the dotted names is the key, or a group that holds the key."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _changed(key: str, saved: object, now: object) -> ConfigIssue:
    """Return the issue about a key whose value is not that of the checkpoint."""
    hint = f"that value, or {command(f'allow_changes=[{key}]')}"
    return ConfigIssue(key, now, f"the checkpoint was made with {saved}", hint=hint)


def _follows(key: str, value: Any, facts: dict[str, Any]) -> bool:
    """Return whether the value of a dataset's key follows from another key, as `data.seq_len`."""
    if key.endswith((".cache_dir", ".val.seed")):  # a folder, and a seed that follows from `seed`
        return True
    if re.match(r"data\.(train|val)\.(parts|weights)\.", key):  # of a mixture
        return any(other.startswith("data.parts.") for other in facts)
    if not (part := re.fullmatch(r"(data|data\..+)\.(train|val|test)\.([^.]+)", key)):
        return False
    group, _, name = part.groups()
    sources = (f"{group}.{name}", f"model.{name}", name)
    return any(facts.get(source) == value for source in sources)
