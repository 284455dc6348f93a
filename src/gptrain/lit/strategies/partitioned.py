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
        metrics of the module and of the callbacks to the data ranks, unless they have one. The
        ranks that read the same samples update the metrics with the same values, which must count
        once.

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
        callbacks: list[pl.Callback] = trainer.callbacks  # ty: ignore[missing-attribute]
        owned = (value for callback in callbacks for value in vars(callback).values())
        for owner in (self.model, *owned):
            for metric in owner.modules() if isinstance(owner, nn.Module) else ():
                if isinstance(metric, Metric) and metric.process_group is None:
                    metric.process_group = self.parallel.data_group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, a sum over the data ranks only.

        The ranks that read the same samples have the same values, which must count once in
        `self.log(name, value, reduce_fx="sum", sync_dist=True)`. All ranks must call this method.

        Args:
            tensor: Tensor of this rank. Any other value is returned unchanged.
            group: Ranks that are reduced over. None for the data ranks if `reduce_op` is "sum",
                else for all ranks. Lightning's votes of all ranks pass `ReduceOp.SUM`.
            reduce_op: "mean", "avg", or another operation that Lightning knows, such as "sum".
        """
        if group is None and reduce_op == "sum":
            group = self.parallel.data_group
        return super().reduce(tensor, group, reduce_op)

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
