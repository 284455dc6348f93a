"""Files of checkpoints: into a draft of our store, or wherever Lightning is asked to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from gptrain.resilience.draft import Draft
from gptrain.resilience.manifest import STATE_NAME
from gptrain.resilience.safe_load import load_file


class StoreIO(TorchCheckpointIO):
    """Lightning's files as they are, and full checkpoints of our store; both are read safely.

    `trainer.save_checkpoint(path, storage_options=draft)` hands the store's draft through.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Draft | None = None
    ) -> None:
        if storage_options is None:
            super().save_checkpoint(checkpoint, path)
            return
        with storage_options.open(STATE_NAME) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Tensors, on the CPU, and plain values; `path` is a checkpoint's folder or its file."""
        path = Path(path)
        return load_file(path / STATE_NAME if path.is_dir() else path)
