"""An old run's folder is read and never written, but by its own continuation."""

from __future__ import annotations

from pathlib import Path

from gptrain.config.checks.place import run_folder
from gptrain.config.checks.run import Run
from gptrain.config.schema import RunConfig


def check_old_run(run: Run) -> None:
    """What from_run names and where this run would write, side by side."""
    old, here = run.get("from_run"), run_folder(run)
    if old is None or here is None:
        return
    key, folder = here
    continues = run.get("task") == "fit" and run.schema is RunConfig
    if not continues and Path(old).expanduser().resolve() == Path(folder).resolve():
        run.error(
            key,
            "the folder of the old run, whose files this one would replace",
            value=folder,
            attempt=f"no {key}: a folder of its own is made",
        )
