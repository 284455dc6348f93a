"""Runs of a scaling-law sweep. Each is a run of train.py in its own folder."""

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
from gptrain.ladder.sizes import Phases, Size, replace_overrides
from gptrain.runs.folder import OVERRIDES, read_run
from gptrain.runs.table import is_same_value

# Keys that may differ between a saved run and the run that the command asks for: they do not change
# what is trained.
INDIFFERENT = (
    "run_dir", "output_dir", "ckpt_path", "allow_changes", "debug", "logger", "hydra", "checkpoint",
    "trainer.enable_progress_bar", "trainer.val_check_interval",
)  # fmt: skip
# Values with which only trainer.max_steps ends a run.
ENDS_BY_STEPS = {
    "task": "fit", "max_tokens": "null", "trainer.max_epochs": -1, "trainer.max_time": "null",
    "scheduler": "warmup_stable_decay", "scheduler.warmup_tokens": "null",
    "scheduler.decay_tokens": "null", "scheduler.total_steps": "null",
    "scheduler.total_tokens": "null", "hydra.job_logging.handlers.console.level": "WARNING",
}  # fmt: skip


def train_size(
    folder: Path, script: Path, typed: Sequence[str], objective: str, size: Size, phases: Phases,
    seed: int, counts: Sequence[float],
) -> list[dict[str, Any]]:  # fmt: skip
    """Train the missing runs of one size and seed, and return one point for each run.

    The longest run comes first: the decay phases of the others start from its checkpoints. A run
    that is done is only read, and one that was interrupted is resumed. Prints the folder of each
    run that is trained.

    Args:
        folder: Folder of the sweep.
        script: Path of the project's train.py.
        typed: Overrides that the user typed.
        objective: Logged name of the loss.
        size: Smaller model that is trained.
        phases: Optimizer steps of the runs.
        seed: Seed of the runs.
        counts: Tokens per parameter of each run, rising.

    Returns:
        Points in the order of `counts`: parameters, tokens, tokens_per_parameter, seed, loss and
        run folder.

    Raises:
        ConfigError: If a run folder holds another run, or a run has no such objective.
        SystemExit: If a run fails, with the exit code of this run.
        OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError: If the files of
            a run are damaged, as in `read_run`.
    """
    points = []
    size_folder = folder / str(size.counts["all"])
    longest = CheckpointStore(size_folder / f"seed-{seed}-{counts[-1]:g}" / CHECKPOINTS_NAME)
    steps = list(zip(counts, phases.stable, phases.total, strict=True))
    for count, stable, total in reversed(steps):
        is_longest = count == counts[-1]
        run_dir = size_folder / f"seed-{seed}-{count:g}"
        start = longest.folder / folder_name(stable)  # checkpoint before the decay phase
        keys = ENDS_BY_STEPS | {
            "seed": seed,
            "scheduler.warmup_steps": phases.warmup,
            "scheduler.decay_steps": total - 1 - stable,
            "trainer.max_steps": total,
            "trainer.val_check_interval": phases.every if is_longest else total,
            "checkpoint": "default",
            "checkpoint.keep": total // phases.every + 2,
        }
        settings = [f"{key}={value}" for key, value in keys.items()]
        words = replace_overrides(typed, [*size.words, *settings])
        if (run_dir / OVERRIDES).exists():
            check_same(folder, run_dir, words)
        if not (run_dir / OVERRIDES).exists() or not read_run(run_dir).is_done:
            has_begun = is_longest or CheckpointStore(run_dir / CHECKPOINTS_NAME).steps()
            words.append(override("ckpt_path", "last" if has_begun else start))
            words.append(override("run_dir", run_dir))
            if not is_longest:
                words.append("allow_changes=[scheduler]")
            print(labels.line("run", run_dir), flush=True)
            code = train(script, words)
            if code != DONE:
                raise SystemExit(code)
        metrics = read_run(run_dir).metrics
        loss = metrics.get(objective)
        if loss is None:
            message = f"{run_dir}: the run did not log this metric"
            allowed = ", ".join(sorted(metrics))
            raise ConfigError.of("objective", objective, message, allowed=allowed, code=BAD_DATA)
        points.append({
            "parameters": size.counts, "tokens": total * size.step_tokens, "seed": seed,
            "tokens_per_parameter": count, "loss": loss, "run": str(run_dir),
        })  # fmt: skip
    return points[::-1]


def check_same(folder: Path, run_dir: Path, words: list[str]) -> None:
    """Check that a run folder of an earlier sweep holds the run that this sweep asks for.

    Keys that do not change what is trained, such as `run_dir` and `logger`, may differ.

    Args:
        folder: Folder of the sweep.
        run_dir: Folder of the run.
        words: Overrides of the run that the command asks for.

    Raises:
        ConfigError: If a key has another value in the saved run.
        OSError, ValueError, TypeError, LookupError, AttributeError, OverflowError: If the files of
            the run are damaged, as in `read_run`.
    """
    run = read_run(run_dir)
    saved = run.typed
    wanted = replace(run, overrides=expand(words)).typed
    for key in sorted(wanted.keys() | saved.keys()):
        old, new = saved.get(key), wanted.get(key)
        if not key.startswith(INDIFFERENT) and not is_same_value(old, new):
            name = run_dir.relative_to(folder)
            message = f"{name} was run with {key}={old}, and this is {key}={new}"
            hint = "another run_dir"
            raise ConfigError.of("run_dir", folder, message, hint=hint, code=FOLDER_UNUSABLE)


def train(script: Path, words: list[str]) -> int:
    """Run `python train.py <words>` in this process and return its exit code.

    A run on several devices starts its ranks as processes, as on the command line. `sys.argv` is
    restored afterwards. An exit with a message instead of a code gives 70; the message is not
    printed. Any other exception of the script passes unchanged.

    Args:
        script: Path of train.py.
        words: Overrides of the run.
    """
    previous_argv = sys.argv
    sys.argv = [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, int):
            return error.code
        return FAILED if error.code else DONE  # sys.exit(message), sys.exit()
    finally:
        sys.argv = previous_argv
    return DONE
