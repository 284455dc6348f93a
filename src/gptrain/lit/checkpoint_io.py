"""Lightning's way to and from the checkpoint store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from gptrain.resilience.draft import Draft
from gptrain.resilience.safe_load import load_file

STATE_NAME = "state.ckpt"


class StoreIO(CheckpointIO):
    """Writes a full checkpoint into a draft of the store, and reads tensors and plain values only.

    `trainer.save_checkpoint(path, storage_options=draft)` hands the draft through.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Draft | None = None
    ) -> None:
        with storage_options.open(STATE_NAME) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint on the CPU, whatever device wrote it; `path` is its folder or its file."""
        path = Path(path)
        return load_file(path / STATE_NAME if path.is_dir() else path)

    def remove_checkpoint(self, path: str | Path) -> None:
        raise NotImplementedError("the store removes checkpoints, by its own rules")
