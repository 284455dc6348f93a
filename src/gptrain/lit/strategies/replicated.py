"""Lightning strategies of one device, and of several ranks that each hold the full net (DDP)."""

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
        parallel: Object that trains the net on its attribute `device`.
    """

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, parallel.device)


class LightningMultiRank(LightningStrategy, DDPStrategy):
    """Trains on several ranks of a process group that exists already, usually with DDP.

    The module is wrapped in DistributedDataParallel if `parallel.ddp_arguments` is not None. The
    strategies that divide the net among the ranks are a subclass.

    Args:
        parallel: Object that partitions and trains the net.
    """

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, **(parallel.ddp_arguments or {}))

    def setup_distributed(self) -> None:
        """Pass the global rank and the world size to Lightning, and do nothing else.

        The process group exists already. Lightning would also seed all ranks with the same number,
        so that their dropout masks would be identical.
        """
        self.set_world_ranks()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks, as Lightning does, but keep the fraction of a mean.

        Lightning 2.6 rounds the mean of an integer tensor; here it is a float tensor. With
        evaluation batches of 18 samples on one rank and 19 on another, `self.log(name, value,
        sync_dist=True)` would otherwise divide the sum by 18 instead of 18.5. All ranks must call
        this method.

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

        Does nothing if the strategy uses neither. Lightning's method is replaced for two reasons:
        it registers a communication hook on GPUs only, and it wraps the module on a side stream, so
        that each gradient waits for events of two streams, and the buckets that DDP replaces in the
        second step take 4 bytes per parameter more (Lightning 2.6).
        """
        if self.parallel.ddp_arguments is not None:
            self.model = DistributedDataParallel(
                cast(nn.Module, self.model),
                device_ids=self.determine_ddp_device_ids(),
                **self.parallel.ddp_arguments,
            )
        if self.parallel.comm_hook is not None:
            cast(DistributedDataParallel, self.model).register_comm_hook(*self.parallel.comm_hook)
