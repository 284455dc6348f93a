"""Your callback, with any of Lightning's hooks. Longer example: gptrain/lit/callbacks/sample.py."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class MyCallback(Callback):
    """Log the norm of all weights at each validation. Config: conf/callbacks/my_callback.yaml.

    Args:
        name: Name of the logged metric.
    """

    def __init__(self, name: str = "weights_norm"):
        self.name = name

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the L2 norm over all parameters."""
        norms: list[Any] = [weight.detach().norm() for weight in pl_module.parameters()]
        pl_module.log(self.name, torch.stack(norms).norm())
