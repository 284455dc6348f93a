"""Your callback: any of Lightning's hooks. A longer one: gptrain/lit/callbacks/sample.py."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class MyCallback(Callback):
    """Logs the norm of all weights at each validation.   conf/callbacks/my_callback.yaml

    Args:
        name: under which it is logged.
    """

    def __init__(self, name: str = "weights_norm"):
        self.name = name

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        norms: list[Any] = [weight.detach().norm() for weight in pl_module.parameters()]
        pl_module.log(self.name, torch.stack(norms).norm())
