"""Which checkpoint a run goes on from, and whether it is still the same run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gptrain.config.problems import BAD_DATA, INPUT_NOT_FOUND, ConfigError, Problem
from gptrain.resilience.manifest import (
    Checkpoint,
    DamagedCheckpoint,
    NoGoodCheckpoint,
    folder_name,
)
from gptrain.resilience.store import CheckpointStore

log = logging.getLogger(__name__)
CHECKPOINTS = "checkpoints"  # of a run folder
# Groups of which every key decides what is computed, and the few that do not.
DECISIVE = ("model", "data", "optimizer", "scheduler")
INDIFFERENT = {
    "data.num_workers",
    "data.batch_size",  # may change where data.global_batch_size stays
    "data.global_batch_size",
    "model.compile",
    "model.activation_checkpointing",
    "data.train.cache_dir",
    "data.val.cache_dir",
}


def identity(cfg: DictConfig, global_batch_size: int, data: str | None = None) -> dict[str, Any]:
    """Flat key -> value of all that must stay the same for a resume to be exact.

    Args:
        global_batch_size: sequences per optimizer step, however they are divided.
        data: fingerprint of the training data, where it has one.
    """
    facts = {"seed": cfg.seed, "data.global_batch_size": global_batch_size, "data": data}
    for group in DECISIVE:
        node = OmegaConf.to_container(cfg[group], resolve=True)
        facts |= {key: value for key, value in _flat(node, group) if key not in INDIFFERENT}
    return facts


def changes(saved: dict[str, Any], now: dict[str, Any], allowed: list[str]) -> list[Problem]:
    """One problem per key that differs and was not allowed to."""
    return [
        Problem(
            key,
            now.get(key),
            f"the checkpoint was made with {saved.get(key)}",
            attempt=f"the value of the checkpoint, or allow_changes=[{key}]",
        )
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    ]


def find_checkpoint(cfg: DictConfig) -> Path | None:
    """The folder that ckpt_path names, verified; None for a fresh run.

    To evaluate an old run by its folder, `best` (where nothing is said) and `last` are that run's.

    Raises: ConfigError with code 65 (damaged) or 66 (not found).
    """
    evaluates_old = cfg.task != "fit" and cfg.from_run is not None
    if cfg.ckpt_path is None and not evaluates_old:
        return None
    folder = Path(cfg.run_dir) / CHECKPOINTS
    try:
        if evaluates_old and cfg.ckpt_path in (None, "best", "last"):
            which = cfg.ckpt_path or "best"
            return choose_checkpoint(cfg.from_run, which, cfg.checkpoint.monitor).path
        if cfg.ckpt_path == "last":
            found = CheckpointStore(folder).newest_good()
            return found.path if found else None
        if cfg.ckpt_path == "best":
            found = CheckpointStore(folder).best(cfg.checkpoint.monitor, "min")
            if found is None:
                raise _not_found(cfg, f"no checkpoint with {cfg.checkpoint.monitor} in {folder}")
            return found.path
        path = Path(cfg.ckpt_path)
        path = path.parent if path.is_file() and (path.parent / "manifest.json").exists() else path
        if not path.exists():
            raise _not_found(cfg, "no such file or folder")
        return CheckpointStore(path.parent).verify(path).path
    except (DamagedCheckpoint, NoGoodCheckpoint) as error:
        problem = Problem("ckpt_path", cfg.ckpt_path, str(error), code=BAD_DATA)
        raise ConfigError([problem]) from error
    except FileNotFoundError as error:
        problem = Problem("from_run", cfg.from_run, str(error), code=INPUT_NOT_FOUND)
        raise ConfigError([problem]) from error


def choose_checkpoint(run_dir: str | Path, which: str, monitor: str) -> Checkpoint:
    """A run's verified checkpoint with the lowest monitor ("best"), or its newest ("last").

    Where none was measured the newest is taken for the best, and a line says so. Nothing in the
    folder is touched, so that the run may still be going on.

    Raises: FileNotFoundError where there is none; NoGoodCheckpoint where all are damaged.
    """
    store, damaged = CheckpointStore(Path(run_dir).expanduser() / CHECKPOINTS), []
    if which == "best" and (best := store.best(monitor, "min")) is not None:
        return best
    for step in reversed(store.steps()):
        try:
            found = store.verify(store.folder / folder_name(step))
        except DamagedCheckpoint as error:
            log.warning("warning: %s; an older one is taken", error)
            damaged.append(error)
            continue
        if which == "best":
            log.warning("warning: %s: no checkpoint has %s, the newest is taken", run_dir, monitor)
        return found
    if damaged:
        raise NoGoodCheckpoint(store.folder, damaged)
    raise FileNotFoundError(f"no checkpoint in {store.folder}")


def _not_found(cfg: DictConfig, wrong: str) -> ConfigError:
    problem = Problem(
        "ckpt_path", cfg.ckpt_path, wrong, attempt="ckpt_path=last", code=INPUT_NOT_FOUND
    )
    return ConfigError([problem])


def _flat(node: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [pair for key, value in node.items() for pair in _flat(value, f"{prefix}.{key}")]
    return [(prefix, node)]
