"""Every problem of a config at once."""

from __future__ import annotations

from omegaconf import DictConfig


def check(cfg: DictConfig) -> None:
    """Raises ConfigError with all that is wrong."""
