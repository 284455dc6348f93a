"""Which checkpoint a run goes on from, and whether it is still the same run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain.plan import dims_of, plan_batch
from gptrain.problems import (
    BAD_DATA,
    FOLDER_UNUSABLE,
    INPUT_NOT_FOUND,
    ConfigError,
    Problem,
)
from gptrain.resilience.manifest import (
    MANIFEST_NAME,
    Checkpoint,
    DamagedCheckpoint,
    NoGoodCheckpoint,
    read_manifest,
)
from gptrain.resilience.status import CHECKPOINTS_NAME, RESULT_NAME
from gptrain.resilience.store import CheckpointStore

log = logging.getLogger(__name__)

# Groups of which every key decides what is computed, and the few that do not.
DECISIVE = ("model", "module", "data", "optimizer", "scheduler")
INDIFFERENT = {
    "data.num_workers",
    "data.batch_size",  # may change where data.global_batch_size stays
    "data.global_batch_size",  # the number that comes out counts, not how it was asked for
    "data.val.seed",  # follows from seed
    "data.train.cache_dir",
    "data.val.cache_dir",
    "model.compile",
    "model.activation_checkpointing",
}


def identity(cfg: DictConfig, global_batch_size: int) -> dict[str, Any]:
    """Flat key -> value of all that a config says and that must not change for an exact resume.

    Keys inside data.train and data.val that only repeat a key of data or model are left out.

    Args:
        global_batch_size: sequences per optimizer step, however they are divided.
    """
    facts = {"seed": cfg.seed, "data.global_batch_size": global_batch_size}
    for group in DECISIVE:
        node = OmegaConf.to_container(cfg[group], resolve=True)
        facts |= {key: value for key, value in _flat(node, group) if key not in INDIFFERENT}
    return {key: value for key, value in facts.items() if not _repeats(key, value, facts)}


def count_sequences(cfg: DictConfig, world_size: int) -> int:
    """Sequences per optimizer step over this many ranks."""
    dims = dims_of(cfg.strategy, world_size)
    asked, accumulate = cfg.data.global_batch_size, cfg.trainer.accumulate_grad_batches
    return plan_batch(cfg.data.batch_size, asked, accumulate, dims.data).global_batch_size


def changed_options(cfg: DictConfig) -> tuple[str, ...]:
    """Options of the optimizer that allow_changes names: a resume gives them their new value."""
    named = [name for name in cfg.allow_changes if name.partition(".")[0] == "optimizer"]
    if "optimizer" in named:
        return tuple(key for key in cfg.optimizer if key != "_target_")
    return tuple(name.partition(".")[2] for name in named)


def differences(cfg: DictConfig, saved: dict[str, Any], global_batch_size: int) -> list[Problem]:
    """What this config says otherwise than the one that was saved, as far as it matters."""
    now = identity(cfg, global_batch_size)
    saved = {key: value for key, value in saved.items() if key != "data"}  # see check_data
    if cfg.task != "fit":  # an evaluation needs the same net, and nothing else
        saved = {key: value for key, value in saved.items() if key.startswith("model.")}
        now = {key: value for key, value in now.items() if key.startswith("model.")}
    return changes(saved, now, cfg.allow_changes)


def changes(saved: dict[str, Any], now: dict[str, Any], allowed: list[str]) -> list[Problem]:
    """One problem per key that differs and was not allowed to.

    A key that the saved run lacked is younger than that run: it is a change only where it was typed
    now, and else stands at its default.
    """
    return [
        Problem(
            key,
            now.get(key),
            f"the checkpoint was made with {saved.get(key)}",
            attempt=f"that value, or allow_changes=[{key}]",
        )
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
        and (key in saved or _is_typed(key))
        and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    ]


def _is_typed(key: str) -> bool:
    """Whether an override of this command sets the key, or a part of it."""
    if not HydraConfig.initialized():
        return True
    typed = (word.lstrip("+").partition("=")[0] for word in HydraConfig.get().overrides.task)
    return any(key == name or key.startswith(f"{name}.") for name in typed)


def find_checkpoint(cfg: DictConfig, run_id: str | None, world_size: int) -> Path | None:
    """The folder that ckpt_path names, every byte of it verified; None for a fresh run.

    To evaluate an old run by its folder, `best` (where nothing is said) and `last` are that run's.
    Call it in one process, under the run lock, before any rank starts.

    Args:
        run_id: of the run folder; checkpoints of another run are not taken for its own.
    Raises: ConfigError: 65 damaged, 66 not found, 2 another run than the one that was saved, 73 a
        fresh run where one has been.
    """
    store = CheckpointStore(Path(cfg.run_dir) / CHECKPOINTS_NAME, run_id)
    evaluates_old = cfg.task != "fit" and cfg.from_run is not None
    if cfg.ckpt_path is None and not evaluates_old:
        _refuse_used_folder(cfg, store)
        return None
    try:
        if evaluates_old and cfg.ckpt_path in (None, "best", "last"):
            by = cfg.checkpoint.monitor, cfg.checkpoint.mode
            found = choose_checkpoint(cfg.from_run, cfg.ckpt_path or "best", *by)
        else:
            found = _named(cfg, store)
    except (DamagedCheckpoint, NoGoodCheckpoint) as error:
        raise ConfigError.of("ckpt_path", cfg.ckpt_path, str(error), code=BAD_DATA) from error
    except FileNotFoundError as error:
        raise ConfigError.of("from_run", cfg.from_run, str(error), code=INPUT_NOT_FOUND) from error
    if found is None and cfg.task != "fit":
        raise _not_found(cfg, f"no checkpoint in {store.folder}", "run_dir=<folder of the run>")
    if found is None:
        log.info("%-9s from the beginning: %s holds no checkpoint yet", "start", store.folder)
        return None
    batch = count_sequences(cfg, world_size)
    if problems := differences(cfg, found.manifest["config"], batch):
        raise ConfigError(problems)
    if cfg.task == "fit":
        log.info("%-9s from step %d: %s", "resume", found.step, found.path)
    return found.path


def choose_checkpoint(
    run_dir: str | Path, which: str, monitor: str, mode: str = "min"
) -> Checkpoint:
    """A run's verified checkpoint with the best monitor ("best"), or its newest ("last").

    Where none was measured the newest is taken for the best, and a line says so. Nothing in the
    folder is touched, so that the run may still be going on.

    Raises: FileNotFoundError where there is none; NoGoodCheckpoint where all are damaged.
    """
    store = CheckpointStore(Path(run_dir).expanduser() / CHECKPOINTS_NAME)
    if which == "best" and (best := store.best(monitor, mode)) is not None:
        return best
    if (found := store.newest_good()) is None:
        raise FileNotFoundError(f"no checkpoint in {store.folder}")
    if which == "best":
        log.warning("warning: %s: no checkpoint has %s, the newest is taken", run_dir, monitor)
    return found


def check_data(cfg: DictConfig, checkpoint: Path | None, fingerprint: str | None) -> None:
    """Raises ConfigError where the content of the training data is not what it was."""
    if checkpoint is None or cfg.task != "fit":
        return
    saved = read_manifest(checkpoint)["config"].get("data")
    if problems := changes({"data": saved}, {"data": fingerprint}, cfg.allow_changes):
        raise ConfigError(problems)


def _named(cfg: DictConfig, store: CheckpointStore) -> Checkpoint | None:
    if cfg.ckpt_path == "last":
        store.clean()
        return store.newest_good()
    if cfg.ckpt_path == "best":
        found = store.best(cfg.checkpoint.monitor, cfg.checkpoint.mode)
        if found is None:
            wrong = f"no checkpoint with {cfg.checkpoint.monitor} in {store.folder}"
            raise _not_found(cfg, wrong, "ckpt_path=last, or run_dir=<folder of the run>")
        return found
    path = Path(cfg.ckpt_path).expanduser()
    if path.is_file() and (path.parent / MANIFEST_NAME).exists():  # a file of a checkpoint
        path = path.parent
    if not path.exists():
        raise _not_found(cfg, "no such file or folder", "ckpt_path=last")
    if path.is_file():
        wrong, attempt = "a file of weights: no run can go on exactly", f"init_from={cfg.ckpt_path}"
        raise ConfigError.of("ckpt_path", cfg.ckpt_path, wrong, attempt=attempt, code=BAD_DATA)
    return CheckpointStore(path.parent).verify(path)


def _not_found(cfg: DictConfig, wrong: str, attempt: str) -> ConfigError:
    return ConfigError.of("ckpt_path", cfg.ckpt_path, wrong, attempt=attempt, code=INPUT_NOT_FOUND)


def _refuse_used_folder(cfg: DictConfig, store: CheckpointStore) -> None:
    if cfg.task != "fit" or cfg.trainer.fast_dev_run:
        return
    steps, result = store.steps(), Path(cfg.run_dir) / RESULT_NAME
    if not steps and not result.exists():
        return
    held = f"a run that was saved at step {steps[-1]}" if steps else "a run that is done"
    wrong = f"holds {held}; a fresh one would mix with it"
    attempt = "ckpt_path=last to go on with it, or another run_dir"
    raise ConfigError.of("run_dir", cfg.run_dir, wrong, attempt=attempt, code=FOLDER_UNUSABLE)


def _repeats(key: str, value: Any, facts: dict[str, Any]) -> bool:
    part, _, name = key.rpartition(".")
    if part not in ("data.train", "data.val", "data.test"):
        return False
    sources = (f"data.{name}", f"model.{name}", name)
    return any(source in facts and facts[source] == value for source in sources)


def _flat(node: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [pair for key, value in node.items() for pair in _flat(value, f"{prefix}.{key}")]
    return [(prefix, node)]
