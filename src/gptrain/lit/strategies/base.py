"""What our strategies add to Lightning's: who computes loss, norm and states of a net."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from gptrain.data.samples import count_batch_targets
from gptrain.lit.losses import LossOptions, has_chunks, head_loss, net_logits
from gptrain.loss import IGNORED, count_targets, logits_in_chunks, next_token_loss
from gptrain.optim import Muon
from gptrain.parallel.dims import ParallelDims
from gptrain.parallel.fit import Net, Unfit
from gptrain.parallel.gradients import clip_grad_norm
from gptrain.parallel.step_mean import StepMean

ONE_OPTIMIZER = (
    "steps, schedule and checkpoints of a run are those of one optimizer in Lightning's loop; "
    "give one optimizer groups with options of their own"
)


@dataclass(frozen=True)
class BuildArgs:
    """What each builder of the table of strategies is given.

    Attributes:
        make_net: draws the net's seed from torch's CPU generator.
        finish: activation checkpointing and compile, once layers are split and before FSDP.
        options: the `strategy` group.
        dims: ranks along each axis; their process group exists.
        precision: Lightning's name.
    """

    make_net: Callable[[], nn.Module]
    finish: Callable[[nn.Module], None]
    device: torch.device
    options: Any
    dims: ParallelDims
    precision: str


@dataclass(frozen=True)
class StrategyInfo:
    """What a strategy was asked for, and the net before it was partitioned."""

    name: str
    net_name: str
    n_parameters: int
    n_matrix_weights: int


if TYPE_CHECKING:  # a base that is instantiated alone, too, where there is no trainer
    from lightning.pytorch.strategies import Strategy as Base
else:
    Base = object


class NetStrategy(Base):
    """The protocol between a module and its strategy, as a whole net on one device fulfils it.

    Attributes:
        info: what it was made for.
        forward_runs_backward: training_step forms the gradients, before Lightning clears them.
        check_finite: called once the norm is known, before the optimizer's step; may raise
            NonFinite.
        grad_norm: of all gradients before clipping, of the last step.
        micro_losses: what training_step returned in each micro-step of this step, detached.
        correction: what the gradients of this step were multiplied by: 1 but where training_step
            gave its loss other targets than the batch has.
        replicas: ranks that hold the same weights and gradients, and divide Muon's work.
        data_group: ranks that see different samples and take a step together; None: there is one.
        step_group: ranks that take a step together; None: all.
    """

    info: StrategyInfo
    forward_runs_backward = False
    check_finite: Callable[[pl.Trainer, Optimizer], None] | None = None
    grad_norm: Tensor | None = None
    replicas: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    step_group: dist.ProcessGroup | None = None
    correction: Tensor | float = 1.0
    _step_mean: StepMean | None = None
    _in_training_step = False
    _gradients_finished = False  # those of this step

    @property
    def net(self) -> nn.Module:
        """The net that is trained."""
        return cast(pl.LightningModule, self.lightning_module).get_submodule("net")

    @property
    def trainer(self) -> pl.Trainer:
        """Whose steps are taken."""
        return cast(pl.LightningModule, self.lightning_module).trainer

    @property
    def step_mean(self) -> StepMean:
        """Of this rank, made when the first step begins."""
        if self._step_mean is None:
            self._step_mean = StepMean(self.data_group, self.root_device)
        return self._step_mean

    # What a module asks for

    def mean_loss(
        self, net: nn.Module, tokens: Tensor, targets: Tensor, options: LossOptions
    ) -> Tensor:
        """Mean loss in nats over the targets that count; in training over those of the whole step.

        There it is the sum over these targets, divided by what a micro-batch of a data rank has of
        them on average: means of it over micro-steps and data ranks are means over targets.
        """
        if self._in_training_step and torch.is_grad_enabled():
            divisor = self.step_mean.divisor_of(targets)
        else:
            divisor = count_targets(targets)
        return self.loss(net, tokens, targets, options, divisor)

    def loss(
        self,
        net: nn.Module,
        tokens: Tensor,
        targets: Tensor,
        options: LossOptions,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Sum of the losses of this rank's samples in nats, divided by divisor."""
        total = self.loss_sum(net, tokens, targets, options)
        return total if divisor is None else total / divisor.to(total.dtype)

    def loss_sum(
        self, net: nn.Module, tokens: Tensor, targets: Tensor, options: LossOptions
    ) -> Tensor:
        if has_chunks(net):
            return head_loss(cast(Net, net).head, cast(Net, net).hidden(tokens), targets, options)
        logits = net_logits(net, tokens, targets)
        return next_token_loss(logits, targets, reduction="sum", **options.added)

    @torch.no_grad()
    def logits(
        self, net: nn.Module, tokens: Tensor, targets: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits (C, V) and targets (C,) of this rank's samples, chunk by chunk, for metrics."""
        if has_chunks(net):
            net = cast(Net, net)
            return logits_in_chunks(net.hidden(tokens), net.head.weight, targets)
        counted = targets != IGNORED  # (B, T)
        logits = net_logits(net, tokens, targets)[counted].float()
        return iter([(logits, targets[counted])])

    def share_metric(self, metric: Metric) -> Tensor:
        """The metric over all samples, alike on all ranks."""
        return metric.compute()

    def clip(self, optimizer: Optimizer, max_norm: float | None) -> None:
        """Scales all gradients to a global norm of at most max_norm, and checks that it is finite.

        Raises: NonFinite.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = None
        if not self._gradients_finished:  # called again by a module that clips in its own way
            self.finish_gradients()
            self.correction = scale = self.step_mean.correction()
            self._gradients_finished = True
        self.grad_norm = self.measure_and_clip(parameters, max_norm, scale)
        if self.check_finite is not None:
            self.check_finite(self.trainer, optimizer)

    def step_loss(self) -> Tensor:
        """Mean over this rank's micro-steps of what training_step returned, of the last step."""
        n_accumulated = self.trainer.accumulate_grad_batches  # divided by already
        return torch.stack(self.micro_losses).mean() * n_accumulated * self.correction

    def finish_gradients(self) -> None:
        """What is left to do once a step after the last backward pass; here nothing."""

    def measure_and_clip(
        self, parameters: list[nn.Parameter], max_norm: float | None, scale: Tensor | None
    ) -> Tensor:
        """Norm of all gradients times scale, alike on all ranks; scaled down to max_norm."""
        return clip_grad_norm(parameters, max_norm, scale=scale)

    # What Lightning's loop calls

    def setup_optimizers(self, trainer: Any) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise Unfit("module._target_", f"several optimizers: {ONE_OPTIMIZER}") from error
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.replicas = self.replicas

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a step: how many targets its micro-batches have, over all data ranks."""
        if batch_idx % self.trainer.accumulate_grad_batches:
            return
        loader = self.trainer.train_dataloader
        if ahead := getattr(loader, "step_targets", None):
            self.step_mean.announce(ahead.pop(0), getattr(loader, "read_ahead", 1))
        else:  # not our loader: as if the other micro-batches had as many
            self.step_mean.announce(count_batch_targets(batch), 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Drops the last step's gradients before a new step's forward pass.

        Lightning does it after the forward pass, whose activations would lie beside them: 4 bytes
        per parameter at the peak of memory.
        """
        if self.trainer.fit_loop.batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.micro_losses: list[Tensor] = []
            self._gradients_finished = False
            self.step_mean.begin()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self._in_training_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.micro_losses.append(closure_loss.detach())
        return super().backward(closure_loss, optimizer, *args, **kwargs)


def check_optimization(module: pl.LightningModule) -> None:
    """Raises: Unfit for manual optimization."""
    if not module.automatic_optimization:
        raise Unfit("module._target_", f"automatic_optimization=False: {ONE_OPTIMIZER}")


def named_beside_net(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module that are not its net's, each once, under their own names."""
    net = getattr(module, "net", None)
    of_net = set(net.parameters()) if isinstance(net, nn.Module) else set()
    return {name: p for name, p in module.named_parameters() if p not in of_net}
