"""Lightning strategy whose ranks each hold a part of the net."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import Metric

from gptrain.lit.strategies.replicated import LightningMultiRank


class LightningPartitioned(LightningMultiRank):
    """Trains a net whose parts are already on their ranks and devices.

    Lightning's own steps that would broadcast the weights of rank 0, move the net to the device and
    wrap the module are skipped.
    """

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the accelerator, the precision and, in a fit, the optimizer.

        Metrics of the module are synchronized among the data ranks only, because all ranks of one
        data rank update them with the same values.
        """
        cast(Accelerator, self.accelerator).setup(trainer)
        self.model = self.precision_plugin.convert_module(cast(nn.Module, self.model))
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        metrics = cast(nn.Module, self.model).get_submodule("metrics")
        for metric in metrics.modules():
            if isinstance(metric, Metric):
                metric.process_group = self.parallel.data_group

    def model_to_device(self) -> None:
        """Move everything but the net to the device; CPU-offloaded shards of the net stay."""
        module: Any = self.model
        net = module.net
        module.net = None
        module.to(self.root_device)
        module.net = net

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without communication inside the block.

        Lightning enters the block in all micro-steps of a step except the last one.
        """
        with self.parallel.without_gradient_sync():
            yield
