"""Tokens, steps and seconds to a validation loss: whole runs of train.py, one after another."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from gptrain.config.compose import PROJECT
from gptrain.problems import JobFailed

# GPT-2's block with AdamW at the best of three learning rates (1e-3, 2e-3, 5e-3); the quickstart.
CONFIGS = (
    "experiment=quickstart model=gpt_nano optimizer=adamw optimizer.lr=2e-3 trainer.max_steps=350 "
    "scheduler=warmup_cosine scheduler.warmup_steps=0.1 scheduler.min_factor=0.1",
    "experiment=quickstart",
)
# Of each run, before its own words: measured often, on few batches, and nothing kept.
COMMON = (
    "checkpoint=none", "++callbacks.sample=null", "logger=none",
    "trainer.enable_progress_bar=false", "trainer.val_check_interval=10",
    "trainer.limit_val_batches=16",
)  # fmt: skip
STOP = {
    "_target_": "lightning.pytorch.callbacks.EarlyStopping",
    "monitor": "val/loss",
    "mode": "min",
    "patience": 2**31,  # it ends at the threshold alone
}


def race(
    target: float | str, configs: list[str], seeds: list[int], words: list[str], folder: Path
) -> list[dict[str, Any]]:
    """One result per config, with a run per seed, which ends where it reaches the target.

    tokens, steps, seconds: to the target, the median over seeds; null where most missed it. Seconds
        are a run's own, validations included.
    tokens_ratio: over those of the first config with the same seed, their median.

    Args:
        target: a loss; or "first": what the first config has at the end of its budget, seed by
            seed.
        configs: overrides of train.py, separated by spaces.   words: more, for all of them.
        folder: of the runs and what they print.

    Raises: JobFailed.
    """
    targets = dict.fromkeys(seeds, None if target == "first" else float(target))
    results = []
    for number, config in enumerate(configs):
        runs = []
        for seed in seeds:
            own = [*shlex.split(config), *words, f"seed={seed}"]
            run = run_to(targets[seed], own, folder / f"{number}-seed-{seed}")
            targets[seed] = run["val_loss"] if targets[seed] is None else targets[seed]
            is_reached = run["val_loss"] <= targets[seed]
            runs.append({"seed": seed, "target": targets[seed], "is_reached": is_reached, **run})
            print(f"{config}: {describe(runs[-1])}", file=sys.stderr, flush=True)
        ways = {key: middle(runs, key) for key in ("tokens", "steps", "seconds")}
        first = results[0]["runs"] if results else runs
        for run, base in zip(runs, first, strict=True):
            run["tokens_ratio"] = run["tokens"] / base["tokens"]
        ratio = middle(runs, "tokens_ratio")
        results.append({"config": config, **ways, "tokens_ratio": ratio, "runs": runs})
    return results


def run_to(target: float | None, words: list[str], folder: Path) -> dict[str, Any]:
    """Tokens, steps, seconds and last validation loss of one run of train.py in this folder."""
    stop = {} if target is None else {**STOP, "stopping_threshold": target}
    overrides = [*COMMON, *words, *(f"+callbacks.target.{key}={stop[key]}" for key in stop)]
    command = [sys.executable, str(PROJECT / "train.py"), *overrides, f"run_dir='{folder}'"]
    if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:  # it has said why
        raise JobFailed(code, f"{shlex.join(words)}: exit code {code}")
    result = json.loads((folder / "result.json").read_text())
    counts = {key: result[key] for key in ("tokens", "steps", "seconds")}
    return {**counts, "val_loss": result["metrics"]["val/loss"]}


def middle(runs: list[dict[str, Any]], key: str) -> float | None:
    """The median of those that reached the target, the others counted as later than all."""
    value = median(run[key] if run["is_reached"] else math.inf for run in runs)
    return value if math.isfinite(value) else None


def describe(run: dict[str, Any]) -> str:
    """A run, or the medians of some."""
    if run["tokens"] is None or not run.get("is_reached", True):
        return f"target missed, val/loss {run['val_loss']:.4f}" if "val_loss" in run else "missed"
    return f"{run['tokens']:,.0f} tokens, {run['steps']:,.0f} steps, {run['seconds']:.0f} s"


def table(results: list[dict[str, Any]]) -> str:
    """For people: medians over seeds, and tokens over those of the first."""
    lines = []
    for one in results:
        low, high = (f(run["target"] for run in one["runs"]) for f in (min, max))
        ratio = "" if one["tokens_ratio"] is None else f", {one['tokens_ratio']:.2f} x the tokens"
        lines += [one["config"], f"  to val/loss {low:.3f}-{high:.3f}: {describe(one)}{ratio}"]
    return "\n".join(lines)
