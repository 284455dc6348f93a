"""LanguageModel, the LightningModule that trains a net to predict the next token of a text."""

# B batch, T time, V vocabulary, N positions with a target

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from gptrain.core.errors import DataError
from gptrain.lit.strategies.base import GPTStrategy
from gptrain.loss import IGNORED, NO_TARGET, PLAIN_CROSS_ENTROPY, LossOptions, sum_dtype
from gptrain.models.attention import layout_argument
from gptrain.parallel.base import Batch, Parallel
from gptrain.parallel.requirements import Net


class LanguageModel(pl.LightningModule):
    """LightningModule that trains a net `tokens (B, T) -> logits (B, T, V)` to predict tokens.

    A subclass may override any of Lightning's hooks. `self.loss(tokens, targets)` works under every
    strategy. `self.net(tokens)` works under every strategy except `pipeline` and `ddp_pipeline`,
    where no rank holds all layers. A batch has tokens (B, T), targets (B, T) and, with
    `data.documents=masked`, the index of each token's document (B, T). The keys of the config's
    `module` group are passed to the subclass as keyword arguments:

        class WithPenalty(LanguageModel):
            def __init__(self, *args, weight=0.1, **kwargs):
                super().__init__(*args, **kwargs)
                self.weight = weight

            def training_step(self, batch):
                tokens, targets, *documents = batch
                loss = self.loss(tokens, targets, *documents) + self.weight * penalty(self.net)
                self.log("train/penalized", loss)
                return loss

    Args:
        net: Net with `forward(tokens)`. Some options need more attributes, which `gptrain.models`
            lists.
        make_optimizer: Function that builds the optimizer for the parameters of a module.
        make_schedule: Function that builds Lightning's `lr_scheduler` dict for an optimizer. It is
            stepped after each optimizer step, unless the dict has another `interval`. None for no
            schedule.
        loss: Label smoothing and z-loss of the training loss, None for neither. `val/loss` and
            `test/loss` are the cross entropy alone.
        metrics: Name -> metric. In validation and test each metric is updated with logits (N, V)
            and targets (N,), in chunks, and logged as `val/<name>` and `test/<name>`.
        token_bytes: Number of bytes of text that each token stands for, (V,) int64, for
            `val/bits_per_byte` and `test/bits_per_byte`. None leaves these out.
    """

    def __init__(
        self,
        net: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        make_schedule: Callable[[torch.optim.Optimizer], dict[str, Any]] | None = None,
        loss: LossOptions | None = None,
        metrics: Mapping[str, Metric] | None = None,
        token_bytes: Tensor | None = None,
    ):
        super().__init__()
        self.net: Net = net
        self._optimizer_factory = make_optimizer
        self._schedule_factory = make_schedule
        self._loss_options = loss or LossOptions()
        self.metrics = cast(Mapping[str, Metric], nn.ModuleDict(metrics or {}))
        self.token_bytes: Tensor | None
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        self._eval_sums: dict[str, Tensor] = {}

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of the net for tokens (B, T).

        With the index of each token's document (B, T), a token attends to its own document only.
        Under a pipeline strategy it raises an IncompatibleModelError.
        """
        return self.net(tokens, **layout_argument(documents))

    def loss(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the loss that training_step minimizes, a scalar in nats per target.

        The loss is the mean cross entropy over the targets that are not -100, with the label
        smoothing and the z-loss of the config. If `targets` are those of a batch of gptrain's
        loader, the mean is taken over the targets of the whole optimizer step: the values of all
        micro-steps and data ranks average to this mean, also if the micro-batches have different
        numbers of targets. For targets that training_step or a hook has changed, for batches of
        another form, outside of training_step and under torch.no_grad, the mean is taken over the
        given targets.

        Lightning averages the result of training_step over micro-steps and data ranks, so that a
        term that is added to the loss counts as it is written.

        All ranks that compute one net together must call this method. With gradients enabled, a
        pipeline also runs its backward pass here.

        Args:
            tokens: Token ids (B, T), int64.
            targets: Next tokens (B, T), int64, or -100.
            documents: Index of the document of each token, (B, T), int64, if documents must not see
                each other.

        Raises:
            IncompatibleModelError: If the net returns anything but logits (B, T, V).
        """
        batch = Batch(tokens, targets, documents)
        return self._parallel.mean_loss(self.net, batch, self._loss_options)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        """Return the loss of a batch, `self.loss(*batch)`."""
        return self.loss(*batch)

    def validation_step(
        self, batch: tuple[Tensor, ...], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add a batch to the evaluation by `evaluate`, with the name of its part of a mixture."""
        part_of = getattr(getattr(self.trainer, "datamodule", None), "part_of", None)
        self.evaluate(*batch, part=part_of(batch_idx) if part_of else None)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log the values of `take_evaluation`, which are none if they were taken before.

        In a run of gptrain `TrainingMonitor` takes and logs them before this hook.
        """
        self.log_dict(self.take_evaluation("test" if self.trainer.testing else "val"))

    on_test_epoch_end = on_validation_epoch_end

    def evaluate(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        part: str | None = None,
    ) -> None:
        """Add a batch to the sums of the evaluation and update the metrics.

        All ranks that compute one net together must call this method. `take_evaluation` returns the
        results. The other arguments, and the errors, are those of `loss`.

        Args:
            part: Name of the part of a mixture whose loss is also logged separately. None for no
                part.
        """
        parallel = self._parallel
        batch = Batch(tokens, targets, documents)
        is_counted = targets != IGNORED  # (B, T)
        nats = parallel.loss_sum(self.net, batch, PLAIN_CROSS_ENTROPY)
        sums = [nats, is_counted.sum()]
        if self.token_bytes is not None:
            sums.append((self.token_bytes[targets.clamp(min=0)] * is_counted).sum())
        # (2,), or (3,) with the bytes
        batch_sums = torch.stack([value.to(sum_dtype(nats.device)) for value in sums])
        for name in ("",) if part is None else ("", part):
            self._eval_sums[name] = self._eval_sums.get(name, 0.0) + batch_sums
        if self.metrics:
            for logits, chunk_targets in parallel.logits(self.net, batch):
                for metric in self.metrics.values():
                    metric.update(logits, chunk_targets)

    def take_evaluation(self, prefix: str) -> dict[str, Tensor]:
        """Reduce the sums of the evaluation over all ranks, reset them and return the metrics.

        Collective. The scalars are `<prefix>/loss` in nats per target, `<prefix>/perplexity`,
        `<prefix>/bits_per_byte` if there are `token_bytes`, `<prefix>/<name>` of each metric
        (`<prefix>/<name>/<key or index>` if its value has several numbers), and
        `<prefix>/<part>/loss` of each part of a mixture. If no batch was evaluated, as in a fit
        without validation, the dict is empty.

        Args:
            prefix: "val" or "test".

        Raises:
            DataError: On all ranks, if all targets of the evaluation, or of a part of a mixture,
                are -100.
        """
        values: dict[str, Tensor] = {}
        for part, sums in self._eval_sums.items():  # all ranks have the parts in the same order
            nats, n_targets, *n_bytes = self.trainer.strategy.reduce(sums, reduce_op="sum")
            if float(n_targets) == 0:  # the mean loss of no target is not defined
                name = f"{prefix} (part {part})" if part else prefix
                raise DataError(f"data.{name}: {NO_TARGET}")
            loss = nats / n_targets
            if part:
                values[f"{part}/loss"] = loss
                continue
            values |= {"loss": loss, "perplexity": loss.exp()}
            if n_bytes:
                values["bits_per_byte"] = nats / n_bytes[0] / math.log(2)
            for name, metric in self.metrics.items():
                values |= _named_scalars(name, self._parallel.broadcast_metric(metric.compute))
                metric.reset()
        self._eval_sums = {}
        return {f"{prefix}/{name}": value for name, value in values.items()}

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of the config group `optimizer` for the parameters of a module.

        A subclass may call this method in its own configure_optimizers.

        Raises:
            ConfigError: If the optimizer does not take an option of the config or cannot train this
                net.
        """
        return self._optimizer_factory(module)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Build Lightning's `lr_scheduler` dict of the config group `scheduler`; None without one.

        A subclass may call this method in its own configure_optimizers. The schedule follows the
        optimizer steps, unless its dict has another `interval`.

        Raises:
            ConfigError: If the length of a phase is a fraction of a run of unknown length.
        """
        if self._schedule_factory is None:
            return None
        return {"interval": "step", **self._schedule_factory(optimizer)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Build the optimizer and the schedule of the config for the parameters of this module.

        Returns the optimizer alone if there is no schedule. Raises the errors of `make_optimizer`
        and `make_schedule`.
        """
        optimizer = self.make_optimizer(self)
        schedule = self.make_schedule(optimizer)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": cast(LRSchedulerConfigType, schedule)}

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients by the norm of the gradients of the full net, over all ranks.

        Collective. Lightning calls this method once per optimizer step; without a
        `gradient_clip_val` it only measures the norm. Clipping by value, and clipping under a
        strategy that is not gptrain's, is left to Lightning.

        Under precision 16-mixed, Lightning leaves the loss scale in the gradients of fused
        optimizers, which remove it themselves. This method removes it before it clips.

        Raises:
            IncompatibleModelError: If other code has changed the gradients of a pipeline.
            RefusedStepError, DataError: As in `GPTStrategy.clip`.
        """
        strategy = self.trainer.strategy
        self._parallel.check_gradients()
        is_by_norm = gradient_clip_algorithm in (None, "norm")
        if not isinstance(strategy, GPTStrategy) or not is_by_norm:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        strategy.clip(optimizer, gradient_clip_val)

    @property
    def _parallel(self) -> Parallel:
        """Object that computes losses and logits: that of the run's strategy, if it has one."""
        with suppress(RuntimeError):  # `self.trainer` raises RuntimeError without a Trainer
            if isinstance(strategy := self.trainer.strategy, GPTStrategy):
                return strategy.parallel
        return Parallel()


def _named_scalars(name: str, value: Any) -> dict[str, Tensor]:
    """Return the scalars of a metric's value by logged name, `name/<key or index>` if several."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.numel() != 1):
        items = list(enumerate(value))
    else:
        return {name: torch.as_tensor(value).reshape(())}
    parts = [_named_scalars(f"{name}/{key}", item) for key, item in items]
    return {key: scalar for part in parts for key, scalar in part.items()}
