"""GPTStrategy, the one object between Lightning's training loop and `gptrain.parallel`.

It is a mixin. `OneDevice` and `ManyRanks` combine it with the two strategies of Lightning that know
nothing of how a net is split: Lightning's own loop tells one device from several ranks by them, and
allows nothing but the first on an Apple GPU.
"""

from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchmetrics import Metric

from gptrain.data.samples import find_targets
from gptrain.lit.strategies.saving import SavingStrategy
from gptrain.loss import sum_dtype
from gptrain.parallel.data_parallel import wrap_in_ddp
from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.parallel.step_mean import StepMean

# Hooks in which a module or a data module may change a batch after it was loaded.
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class GPTStrategy(SavingStrategy):
    """Mixin for Lightning's strategies that lets `self.parallel` compute losses and gradients.

    Attributes:
        decide_step: Function that makes the optimizer skip its update if the step is bad.
            `StepGuard.start` sets it.
        grad_norm: Norm of all gradients of the last step before clipping, a scalar tensor. None if
            it was not measured.
        step_mean: Divisor of the losses of the current step, and mean loss of the last step. It
            exists once the optimizer is built.
    """

    decide_step: Callable[[Optimizer], object] = staticmethod(bool)  # decides nothing
    grad_norm: Tensor | None = None
    step_mean: StepMean

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the module's optimizer and schedules, and prepare what the steps need."""
        super().setup_optimizers(trainer)
        self.parallel.prepare(self.module, self.optimizers[0])
        self.step_mean = StepMean(self.parallel.data_group, self.root_device)
        self._saved_buffers = _find_saved_buffers(self.module)  # names in the module
        owners = (self.module, getattr(trainer, "datamodule", None))
        self._changes_batches = any(is_overridden(h, owner) for h in _HOOKS for owner in owners)

    def synchronize_buffers(self) -> None:
        """Broadcast the saved buffers of the module from the first data-parallel rank. Collective.

        `TrainingMonitor` calls it after each step. Each rank updates buffers, such as running
        averages of BatchNorm, with its own samples, but a checkpoint holds those of one rank.
        """
        for name in self._saved_buffers if self.parallel.dims.data > 1 else ():
            buffer = self.module.get_buffer(name)
            dist.broadcast(buffer, group=self.parallel.data_group, group_src=0)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch to the device, and set `StepMean.counted` in training."""
        batch = super().batch_to_device(batch, *args, **kwargs)
        trainer = self.module.trainer
        if trainer.training:
            has_counts = hasattr(trainer.train_dataloader, "step_targets")
            targets = find_targets(batch) if has_counts and not self._changes_batches else None
            self.step_mean.counted = None if targets is None else (targets, targets._version)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Free the old gradients and compute the divisor of the losses before each step.

        Lightning would free them after the forward pass, which raises the peak memory by their
        size. FSDP2 communicates gradients in the last micro-step only, unless
        `strategy.accumulate_shards` is set.
        """
        trainer = self.module.trainer
        net = getattr(self.module, "net", None)
        if isinstance(net, FSDPModule) and not self.parallel.options.accumulate_shards:
            is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
            net.set_requires_gradient_sync(is_last)
        if batch_idx % trainer.accumulate_grad_batches:
            return
        self.optimizers[0].zero_grad()
        self.grad_norm = None
        counts = getattr(trainer.train_dataloader, "step_targets", None)
        n_targets = counts.pop(0) if counts else 0
        self.step_mean.begin_step(n_targets, trainer.accumulate_grad_batches)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step, in which the loss has the divisor of the step."""
        self.parallel.step_mean = self.step_mean
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.parallel.step_mean = None

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Keep the loss for the mean of the step, and run Lightning's backward pass.

        Raises an IncompatibleModelError if the loss is a DTensor, because training_step has added
        weights that are split over ranks.
        """
        if isinstance(closure_loss, DTensor):
            message = "training_step adds weights that are split over ranks; try: strategy=ddp"
            raise IncompatibleModelError("strategy.name", message)
        batch_idx = self.module.trainer.fit_loop.batch_idx
        self.step_mean.losses[batch_idx] = closure_loss.detach()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def finish_gradients(self) -> None:
        """Complete the gradients before hooks read them, and average the losses. Collective.

        `TrainingMonitor` calls it once per step, after the last backward pass. Raises the errors of
        `Parallel.finish_gradients`.
        """
        self.parallel.finish_gradients()
        self.step_mean.reduce(self.module.trainer.accumulate_grad_batches)

    def clip(self, optimizer: Optimizer, max_norm: float | None) -> None:
        """Clip the finished gradients of a step, and decide whether the step is taken. Collective.

        The first call of a step stores the norm before clipping in `grad_norm`, and decides. A
        module that clips in its own way may call it again. A `max_norm` of None or 0 only measures.

        Raises:
            RefusedStepError: If this step ends the run, and the optimizer cannot skip an update on
                its device. Otherwise `StepGuard.read` raises the error.
            DataError: In the same case, if step 0 of the run has no target.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = self.parallel.measure_and_clip(parameters, max_norm)
        if self.grad_norm is None:
            self.grad_norm = norm
            self.decide_step(optimizer)

    def teardown(self) -> None:
        """Tear down the precision plugin and the accelerator, but leave the net on its device.

        Lightning's own teardown would move weights and optimizer states to the CPU, for which the
        host may lack memory.
        """
        self.precision_plugin.teardown()
        cast(Any, self.accelerator).teardown()


class OneDevice(GPTStrategy, SingleDeviceStrategy):
    """Trains on one device, the second argument, without a process group."""


class ManyRanks(GPTStrategy, DDPStrategy):
    """Trains on the ranks of an existing process group, as DDP if they hold full nets.

    Partitioned nets have no wrapper: their `Parallel` communicates the gradients.
    """

    def setup_distributed(self) -> None:
        """Pass the ranks to Lightning, whose own method gives all ranks the same dropout masks."""
        self.set_world_ranks()

    def setup(self, trainer: Any) -> None:
        """Set up the accelerator, the precision and, in a fit, the optimizer.

        A partitioned net is neither broadcast nor moved nor wrapped. Metrics are reduced over the
        data ranks: ranks that read the same samples update them with the same values, which must
        count once.
        """
        if not self.parallel.is_partitioned:
            super().setup(trainer)
            return
        cast(Any, self.accelerator).setup(trainer)
        self.model = self.precision_plugin.convert_module(cast(nn.Module, self.model))
        module: Any = self.model
        net, module.net = module.net, None  # the net is on its device, or offloaded to the CPU
        module.to(self.root_device)
        module.net = net
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        owned = [value for callback in trainer.callbacks for value in vars(callback).values()]
        for owner in (part for part in (module, *owned) if isinstance(part, nn.Module)):
            for metric in (part for part in owner.modules() if isinstance(part, Metric)):
                metric.process_group = metric.process_group or self.parallel.data_group

    def configure_ddp(self) -> None:
        """Wrap the module in DistributedDataParallel, with the communication hook of the options.

        Lightning 2.6 registers a hook on GPUs only, and wraps the module on a side stream, so that
        each gradient waits for events of two streams, and the buckets take 4 bytes per parameter
        more.
        """
        module, device_ids = cast(nn.Module, self.model), self.determine_ddp_device_ids()
        self.model = wrap_in_ddp(module, device_ids, self.parallel.options)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, or over the data ranks if `reduce_op` is "sum".

        Ranks that read the same samples have the same values, which a sum must count once.
        `ReduceOp.SUM`, which Lightning passes for votes, sums over all ranks. The mean of integers
        is a float tensor, because Lightning divides sums by means of batch sizes. With a `group` it
        is reduced over this group.
        """
        if group is None and reduce_op == "sum":
            group = self.parallel.data_group
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(sum_dtype(tensor.device))
        return super().reduce(tensor, group, reduce_op)


def _find_saved_buffers(module: nn.Module) -> list[str]:
    """Return the names of the buffers in checkpoints, but not the sums of metrics over samples."""
    metrics = [f"{name}." for name, part in module.named_modules() if isinstance(part, Metric)]
    saved = module.state_dict(keep_vars=True).keys() & dict(module.named_buffers()).keys()
    return sorted(name for name in saved if not name.startswith(tuple(metrics)))
