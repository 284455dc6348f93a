"""The runs of a ladder: each as `python train.py` does it, in a folder of its own."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptrain.checkpoints.manifest import folder_name
from gptrain.checkpoints.status import CHECKPOINTS_NAME
from gptrain.checkpoints.store import CheckpointStore
from gptrain.config.from_run import expand
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, DONE, FAILED, FOLDER_UNUSABLE, ConfigError
from gptrain.core.shell import override
from gptrain.ladder.sizes import Phases, Size, merged
from gptrain.runs.folder import OVERRIDES, read_run
from gptrain.runs.table import is_same_value

# With other values of these it is the same run: where and how it runs, what it keeps.
INDIFFERENT = (
    "run_dir", "output_dir", "ckpt_path", "allow_changes", "debug", "logger", "hydra", "checkpoint",
    "trainer.enable_progress_bar", "trainer.val_check_interval",
)  # fmt: skip
ENDS_BY_STEPS = {  # a run ends by its steps alone
    "task": "fit", "max_tokens": "null", "trainer.max_epochs": -1, "trainer.max_time": "null",
    "scheduler": "warmup_stable_decay", "scheduler.warmup_tokens": "null",
    "scheduler.decay_tokens": "null", "scheduler.total_steps": "null",
    "scheduler.total_tokens": "null", "hydra.job_logging.handlers.console.level": "WARNING",
}  # fmt: skip


def climb(
    folder: Path, script: Path, typed: Sequence[str], objective: str, size: Size, phases: Phases,
    seed: int, counts: Sequence[float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Train the missing runs of one size and seed, and return one point for each run.

    The longest run comes first: the decay phases of the others start from its checkpoints.

    Args:
        folder: Folder of the ladder.
        script: Path of the project's train.py.
        typed: Overrides that the user typed.
        objective: Logged name of the loss.
        size: The net.
        phases: Optimizer steps of the runs.
        seed: Seed of the runs.
        counts: Tokens per parameter of each run, rising.

    Returns:
        Points in the order of `counts`: parameters, tokens, seed, loss and run folder.

    Raises:
        ConfigError: If a run folder holds another run, or a run has no such objective.
        SystemExit: If a run fails, with the exit code of this run.
    """
    points, above = [], folder / str(size.counts["all"])
    store = CheckpointStore(above / f"seed-{seed}-{counts[-1]:g}" / CHECKPOINTS_NAME)
    for count, stable, total in list(zip(counts, phases.stable, phases.total, strict=True))[::-1]:
        is_longest, run_dir = count == counts[-1], above / f"seed-{seed}-{count:g}"
        start = store.folder / folder_name(stable)
        keys = ENDS_BY_STEPS | {
            "seed": seed,
            "scheduler.warmup_steps": phases.warmup,
            "scheduler.decay_steps": total - 1 - stable,
            "trainer.max_steps": total,
            "trainer.val_check_interval": phases.every if is_longest else total,
            "checkpoint": "default",
            "checkpoint.keep": total // phases.every + 2,
        }
        words = merged(typed, [*size.words, *(f"{key}={value}" for key, value in keys.items())])
        if (run_dir / OVERRIDES).exists():
            check_same(folder, run_dir, words)
        if not (run_dir / OVERRIDES).exists() or not read_run(run_dir).is_done:
            begun = is_longest or CheckpointStore(run_dir / CHECKPOINTS_NAME).steps()
            words.append(override("ckpt_path", "last" if begun else start))
            words.append(override("run_dir", run_dir))
            words += [] if is_longest else ["allow_changes=[scheduler]"]
            print(labels.line("run", run_dir), flush=True)
            if code := train(script, words):
                raise SystemExit(code)
        metrics = read_run(run_dir).metrics
        if (loss := metrics.get(objective)) is None:
            message, allowed = f"{run_dir}: not among its metrics", ", ".join(sorted(metrics))
            raise ConfigError.of("objective", objective, message, allowed=allowed, code=BAD_DATA)
        points.append({
            "parameters": size.counts, "tokens": total * size.step_tokens, "seed": seed,
            "tokens_per_parameter": count, "loss": loss, "run": str(run_dir),
        })  # fmt: skip
    return points[::-1]


def check_same(folder: Path, run_dir: Path, words: list[str]) -> None:
    """Raises: ConfigError where run_dir holds another run than these words make."""
    there = read_run(run_dir)
    then, now = there.typed, replace(there, overrides=expand(words)).typed
    for key in sorted(now.keys() | then.keys()):
        old, new = then.get(key), now.get(key)
        if not key.startswith(INDIFFERENT) and not is_same_value(old, new):
            run = run_dir.relative_to(folder)
            message = f"{run} was run with {key}={old}, and this is {key}={new}"
            hint, code = "another run_dir", FOLDER_UNUSABLE
            raise ConfigError.of("run_dir", folder, message, hint=hint, code=code)


def train(script: Path, words: list[str]) -> int:
    """The exit code of `python train.py <words>`, in this process, as a job of a sweep runs."""
    before, sys.argv = sys.argv, [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else FAILED if left.code else DONE
    finally:
        sys.argv = before
    return DONE
