"""What is done to a run folder before its ranks start, by the one process that holds it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from gptrain.assemble.resume import find_checkpoint
from gptrain.launch.ending import newest_checkpoint
from gptrain.launch.restarts import FRUITLESS_STARTS, is_restart, note_start
from gptrain.problems import FAILED, JobFailed
from gptrain.resilience.manifest import read_manifest
from gptrain.resilience.status import clear_status, is_guest

BEATS_NAME = ".beats"  # signs of life of ranks that torchrun or SLURM started


def prepare(cfg: DictConfig, run_id: str, world_size: int) -> None:
    """Puts the checkpoint to go on from into cfg.ckpt_path; empties the folder of an old start.

    Raises: ConfigError, with the folder as it was; JobFailed if torchrun's starts get nowhere.
    """
    if not choose_start(cfg, run_id, world_size, again=is_restart()):
        line = f"error: {FRUITLESS_STARTS} starts in a row got no further"
        print(line, file=sys.stderr, flush=True)
        raise JobFailed(FAILED, line)
    shutil.rmtree(Path(cfg.run_dir) / BEATS_NAME, ignore_errors=True)


def choose_start(cfg: DictConfig, run_id: str, world_size: int, again: bool) -> bool:
    """Verifies what ckpt_path names and puts its folder there, null for a start from step 0.

    Args:
        again: a launcher's own start, which takes the newest checkpoint, whatever was typed.
    Returns:
        False if it has started again often enough without progress.
    Raises: ConfigError.
    """
    if again and cfg.task == "fit" and newest_checkpoint(cfg.run_dir):
        cfg.ckpt_path = "last"
    checkpoint = find_checkpoint(cfg, run_id, world_size)
    cfg.ckpt_path = None if checkpoint is None else str(checkpoint)
    if cfg.task == "fit":
        step = read_manifest(checkpoint)["step"] if checkpoint else 0
        if note_start(cfg.run_dir, step, again) >= FRUITLESS_STARTS:
            return False
    clear_status(cfg.run_dir)
    return True


def keep_config(run_dir: str | Path, composed: DictConfig) -> None:
    """Hydra's record of a run, by us and not by Hydra, which would write before we hold the folder.

    So a start that is refused leaves the record of the run that lives there alone, and so does an
    evaluation in the folder of a run that was trained: its own lies in .hydra/<task>.
    """
    folder, hydra = Path(run_dir) / ".hydra", HydraConfig.instance().cfg
    if is_guest(run_dir, composed.task):
        folder /= composed.task
    folder.mkdir(parents=True, exist_ok=True)
    records = {"config": composed, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    for name, record in records.items():
        (folder / f"{name}.yaml").write_text(OmegaConf.to_yaml(record), encoding="utf-8")
