"""Measure tokens, steps and seconds to a validation loss, in complete runs of train.py."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gptrain.core.shell import quoted

TRAIN = Path(__file__).parents[3] / "train.py"
# GPT-2's block with AdamW at the best of three learning rates (1e-3, 2e-3, 5e-3); the quickstart.
CONFIGS = (
    "experiment=quickstart model=gpt_nano optimizer=adamw optimizer.lr=2e-3 trainer.max_steps=350 "
    "scheduler=warmup_cosine scheduler.warmup_steps=0.1 scheduler.min_factor=0.1",
    "experiment=quickstart",
)
# Overrides of each run before those of its config: frequent short validations, no saved files.
COMMON = (
    "checkpoint=none", "++callbacks.sample=null", "logger=none",
    "trainer.enable_progress_bar=false", "trainer.val_check_interval=10",
    "trainer.limit_val_batches=16",
)  # fmt: skip
COUNTS = ("tokens", "steps", "seconds")
# With this patience, the run ends only at the threshold.
STOP = (
    "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/loss, patience: 1000000, "
    "stopping_threshold: %r}"
)


def race(cfg: Any, words: list[str]) -> list[dict[str, Any]]:
    """Train each config once per seed, until the run reaches the target loss.

    Args:
        cfg: Options of the command. With target_loss=first, the target of a seed is the final loss
            of the first config with this seed.
        words: Overrides of all runs, after those of the config.

    Returns:
        One dict per config with the keys:
        tokens, steps, seconds: Median over seeds until the target, or None if most runs missed it.
            The seconds include validations.
        runs: Results of the single runs.

    Raises:
        CalledProcessError: If a run fails.
    """
    results: list[dict[str, Any]] = []
    for number, config in enumerate(cfg.configs):
        runs: list[dict[str, Any]] = []
        for seed in range(cfg.seed, cfg.seed + cfg.seeds):
            aim = cfg.target_loss
            if aim == "first":
                aim = results[0]["runs"][len(runs)]["target"] if results else None
            own = [*shlex.split(config), *words, f"seed={seed}"]
            runs.append(run_to(aim, own, Path(cfg.run_dir) / f"{number}-seed-{seed}"))
            print(f"{config} seed={seed}: {runs[-1]}", file=sys.stderr)
        counts = {key: middle(runs, key) for key in COUNTS}
        results.append({"config": config, **counts, "runs": runs})
    return results


def run_to(target: float | None, words: list[str], folder: Path) -> dict[str, Any]:
    """Run train.py until the target loss, and return its tokens, steps and seconds.

    Without a target, the run uses its whole budget, and its final loss becomes the target.
    """
    stop = [] if target is None else [f"+callbacks.target={STOP % target}"]
    overrides = [*COMMON, *words, *stop, f"run_dir={quoted(str(folder))}"]
    subprocess.run([sys.executable, str(TRAIN), *overrides], stdout=subprocess.DEVNULL, check=True)
    result = json.loads((folder / "result.json").read_text())
    loss = result["metrics"]["val/loss"]
    target = loss if target is None else target
    counts = {key: result[key] for key in COUNTS}
    return {"target": target, "val_loss": loss, "is_reached": loss <= target, **counts}


def middle(runs: list[dict[str, Any]], key: str) -> float | None:
    """Return the median over runs. A run that missed the target counts as infinite."""
    value = median(run[key] if run["is_reached"] else math.inf for run in runs)
    return value if math.isfinite(value) else None


def table(results: list[dict[str, Any]]) -> str:
    """Return a table of medians over seeds."""
    lines = []
    for result in results:
        low, high = (f(run["target"] for run in result["runs"]) for f in (min, max))
        tokens, steps, seconds = (result[key] for key in COUNTS)
        took = "missed" if tokens is None else f"{tokens:,} tokens, {steps} steps, {seconds:.0f} s"
        lines += [result["config"], f"  to val/loss {low:.3f}-{high:.3f}: {took}"]
    return "\n".join(lines)
