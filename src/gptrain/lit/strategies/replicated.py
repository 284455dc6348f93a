"""Lightning strategies whose ranks each hold the full net: one device, or several with DDP."""

from typing import Any, cast

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gptrain.lit.strategies.base import LightningStrategy
from gptrain.loss import sum_dtype
from gptrain.parallel.strategy import ParallelStrategy


class LightningSingleDevice(LightningStrategy, SingleDeviceStrategy):
    """Trains on one device, without a process group.

    Args:
        parallel: Object that trains the net, on its own device.
    """

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, parallel.device)


class LightningMultiRank(LightningStrategy, DDPStrategy):
    """Trains on several ranks of a process group that exists already.

    The module is wrapped in DistributedDataParallel if `parallel.ddp_arguments` is not None.

    Args:
        parallel: Object that partitions and trains the net.
    """

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, **(parallel.ddp_arguments or {}))

    def setup_distributed(self) -> None:
        """Set the ranks in Lightning; do not start a process group and do not seed the generators.

        Lightning would seed all ranks with the same number, so that their dropout masks would be
        identical.
        """
        self.set_world_ranks()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks. The mean of an integer tensor is a float tensor.

        All ranks must call this method. Lightning 2.6 rounds the mean of an integer tensor. With
        evaluation batches of 18 samples on one rank and 19 on another, `self.log(name, value,
        sync_dist=True)` would then divide the sum by 18 instead of 18.5.

        Args:
            tensor: Tensor of this rank. Any other value is returned unchanged.
            group: Ranks that are reduced over. None for all ranks.
            reduce_op: "mean", "avg", or another operation that Lightning knows, such as "sum".
        """
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(sum_dtype(tensor.device))
        return super().reduce(tensor, group, reduce_op)

    def configure_ddp(self) -> None:
        """Wrap the module in DistributedDataParallel and register `parallel.comm_hook`, if any.

        Lightning would register a communication hook on GPUs only. Lightning 2.6 also wraps the
        module on a side stream, so that each gradient would wait for events of two streams,
        and the buckets that DDP replaces in the second step would take 4 bytes per parameter more.
        """
        if self.parallel.ddp_arguments is not None:
            self.model = DistributedDataParallel(
                cast(nn.Module, self.model),
                device_ids=self.determine_ddp_device_ids(),
                **self.parallel.ddp_arguments,
            )
        if self.parallel.comm_hook is not None:
            cast(DistributedDataParallel, self.model).register_comm_hook(*self.parallel.comm_hook)
