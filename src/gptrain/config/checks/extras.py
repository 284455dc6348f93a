"""Libraries that a choice needs and an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gptrain.config.checks.run import Run


def check_extras(run: Run) -> None:
    """Each library that this run imports late is installed; nothing is imported here."""
    for path, node in run.targets():
        if str(node["_target_"]).endswith(".WandbLogger"):
            _need(run, path, "wandb", "wandb")
    source = run.get("init_from")
    if source is not None:
        found = Path(source).expanduser()
        if found.suffix == ".safetensors" or any(found.glob("model.safetensors*")):
            _need(run, "init_from", "safetensors", "export")
    if run.has("format"):  # the verb that exports
        _need(run, "format", "safetensors", "export")


def _need(run: Run, key: str, library: str, extra: str) -> None:
    if find_spec(library) is None:
        attempt = f"pip install 'gptrain[{extra}]'"
        run.error(key, f"needs the package {library}", value=None, attempt=attempt)
