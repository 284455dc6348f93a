"""Lightning strategy of nets that are divided among the ranks (FSDP, tensor, pipeline, context)."""

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
    """Trains a net of which each rank holds a part, already on its device.

    DDPStrategy of Lightning would broadcast the weights of rank 0, move the net to the device and
    wrap the module. These three steps are skipped.
    """

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the accelerator, the precision and, in a fit, the optimizer.

        Moves the module, except for its net, to the device. Also sets the process group of the
        module's metrics to the data ranks. The ranks that read the same samples update the metrics
        with the same values, which must count once.

        Args:
            trainer: Trainer of the run.

        Raises:
            IncompatibleModelError: If the module's configure_optimizers returns several optimizers.
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
        """Move the module to the device, except for its net.

        The net is on its device already, or stays on the CPU if its shards are offloaded.
        """
        module: Any = self.model
        net = module.net
        module.net = None
        module.to(self.root_device)
        module.net = net

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients inside the block without communication between ranks.

        Lightning runs all micro-steps of an optimizer step except the last one in such a block.
        """
        with self.parallel.without_gradient_sync():
            yield
