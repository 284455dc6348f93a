"""Starts a job: in this process where it has one device, else in ranks that the parent watches."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig

from gptrain.config import this_process
from gptrain.launch.outcome import JobFailed

__all__ = ["JobFailed", "run"]


def run(train: Callable[[DictConfig], dict], cfg: DictConfig) -> dict[str, float]:
    """Runs one job to its end and returns its metrics.

    Raises:
        JobFailed: with the exit code and the line that says why.
    """
    from gptrain.config.machine import find_machine  # torch

    machine = find_machine(cfg)
    if this_process().is_rank or machine.n_local == 1:
        from gptrain.launch.rank import run_rank

        return run_rank(train, cfg)
    from gptrain.launch.local import supervise

    return supervise(train, cfg, machine.n_local)
