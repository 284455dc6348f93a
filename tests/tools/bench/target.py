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

from gptrain.core.errors import JobFailedError
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
        tokens_ratio: Median ratio of the tokens to those of the first config with the same seed.
        runs: Results of the single runs.

    Raises:
        JobFailedError: If a run fails.
    """
    results: list[dict[str, Any]] = []
    for number, config in enumerate(cfg.configs):
        runs = []
        for seed in range(cfg.seed, cfg.seed + cfg.seeds):
            first = results[0]["runs"][len(runs)] if results else None
            aim = cfg.target_loss if cfg.target_loss != "first" else first and first["target"]
            own = [*shlex.split(config), *words, f"seed={seed}"]
            run = {"seed": seed, **run_to(aim, own, Path(cfg.run_dir) / f"{number}-seed-{seed}")}
            runs.append({**run, "tokens_ratio": run["tokens"] / (first or run)["tokens"]})
            loss, lasted = run["val_loss"], describe(run)
            print(f"{config} seed={seed}: val/loss {loss:.4f} after {lasted}", file=sys.stderr)
        keys = ("tokens", "steps", "seconds", "tokens_ratio")
        results.append({"config": config, **{key: middle(runs, key) for key in keys}, "runs": runs})
    return results


def run_to(target: float | None, words: list[str], folder: Path) -> dict[str, Any]:
    """Run train.py until the target loss, and return its tokens, steps and seconds.

    Without a target, the run uses its whole budget, and its final loss becomes the target.
    """
    stop = [] if target is None else [f"+callbacks.target={STOP % target}"]
    overrides = [*COMMON, *words, *stop, f"run_dir={quoted(str(folder))}"]
    command = [sys.executable, str(TRAIN), *overrides]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise JobFailedError(code, f"{shlex.join(words)}: exit code {code}")
    result = json.loads((folder / "result.json").read_text())
    loss = result["metrics"]["val/loss"]
    aim = {"target": loss if target is None else target, "val_loss": loss}
    counts = {key: result[key] for key in ("tokens", "steps", "seconds")}
    return {**aim, "is_reached": loss <= aim["target"], **counts}


def middle(runs: list[dict[str, Any]], key: str) -> float | None:
    """Return the median over runs. A run that missed the target counts as infinite."""
    value = median(run[key] if run["is_reached"] else math.inf for run in runs)
    return value if math.isfinite(value) else None


def describe(result: dict[str, Any]) -> str:
    """Return one line with the tokens, steps and seconds of a run, or of medians of runs."""
    return (
        f"{result['tokens']:,.0f} tokens, {result['steps']:,.0f} steps, {result['seconds']:.0f} s"
    )


def table(results: list[dict[str, Any]]) -> str:
    """Return a table of medians over seeds, and of tokens in relation to the first config."""
    lines = []
    for result in results:
        low, high = (f(run["target"] for run in result["runs"]) for f in (min, max))
        took = "missed"
        if result["tokens"] is not None:
            took = f"{describe(result)}, {result['tokens_ratio']:.2f} x the tokens"
        lines += [result["config"], f"  to val/loss {low:.3f}-{high:.3f}: {took}"]
    return "\n".join(lines)
