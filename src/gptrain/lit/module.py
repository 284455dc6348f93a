"""LanguageModel: any net of the models' contract, trained on next-token cross entropy."""

# B batch, T time, V vocabulary, N positions that count

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfigType, OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import Metric

from gptrain.core.small_files import DataError
from gptrain.lit.metrics import named_numbers
from gptrain.lit.strategies.base import LightningStrategy
from gptrain.loss import IGNORED, PLAIN, LossOptions
from gptrain.parallel.requirements import Net
from gptrain.parallel.state import named_parameters
from gptrain.parallel.strategy import ParallelStrategy

log = logging.getLogger(__name__)


class LanguageModel(pl.LightningModule):
    """Wraps a net `tokens (B, T) -> logits (B, T, V)` with its loss, optimizer and schedule.

    A subclass may override any hook of Lightning's. `self.loss(tokens, targets)` works under every
    strategy; `self.net(tokens)` wherever a rank can run the whole net, which is all but pipelines.
    Its own keyword arguments are the other keys of the config's `module` group:

        class WithPenalty(LanguageModel):
            def __init__(self, *args, weight=0.1, **kwargs):
                super().__init__(*args, **kwargs)
                self.weight = weight

            def training_step(self, batch):
                tokens, targets = batch
                loss = self.loss(tokens, targets)
                self.log("train/penalised", loss)
                return loss + self.weight * penalty(self.net)

    Args:
        net: the net.
        make_optimizer: module -> optimizer over all that it trains, at the schedule's peak.
        make_schedule: optimizer -> Lightning's lr_scheduler entry, stepped after each optimizer
            step where it says nothing else.
        loss: what is added to the cross entropy in training; `val/loss` stays plain.
        metrics: name -> metric that is fed with (logits (N, V), targets (N,)) in validation and
            test, chunk by chunk, and logged as `val/<name>` and `test/<name>`.
        token_bytes: (V,) bytes of text that each token stands for; opens `val/bits_per_byte`.
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
        self.net = cast(Net, net)
        self._optimizer_factory, self._schedule_factory = make_optimizer, make_schedule
        self.groups_read: set[str] = set()  # of optimizer and scheduler, once they were built
        self.loss_options = loss or LossOptions()
        self.metrics = cast(Mapping[str, Metric], nn.ModuleDict(metrics or {}))
        self.token_bytes: Tensor | None
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        self.eval_sums: Tensor | float = 0.0  # of this rank: nats, tokens and, if known, bytes
        self.part_sums: dict[str, Tensor] = {}  # the same of each part of a mixture

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        return self.net(tokens)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """What training_step minimises: mean loss in nats over the targets that are not -100.

        In training over those of the whole optimizer step: the mean of what this returns in all
        its micro-steps and on all data ranks, however targets are missing.
        """
        return self._parallel().mean_loss(self.net, tokens, targets, self.loss_options)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch  # (B, T), (B, T)
        return self.loss(tokens, targets)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        part_of = getattr(getattr(self.trainer, "datamodule", None), "part_of", None)
        self.evaluate(*batch, part=part_of(batch_idx) if part_of else None)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """In a Trainer of one's own; in a run of ours its Steps has taken them already."""
        self.log_dict(self.take_evaluation("test" if self.trainer.testing else "val"))

    on_test_epoch_end = on_validation_epoch_end

    def evaluate(self, tokens: Tensor, targets: Tensor, part: str | None = None) -> None:
        """Adds a batch (B, T) to the plain loss and to the metrics; logged at the set's end.

        Args:
            part: of a mixture, whose loss is logged by itself, too.
        """
        parallel, counted = self._parallel(), targets != IGNORED  # (B, T)
        nats = parallel.loss_sum(self.net, tokens, targets, PLAIN)
        sums = [nats, counted.sum()]
        if self.token_bytes is not None:
            sums.append((self.token_bytes[targets.clamp(min=0)] * counted).sum())
        exact = torch.float32 if nats.device.type == "mps" else torch.float64  # it has no other
        added = torch.stack([one.to(exact) for one in sums])
        self.eval_sums = self.eval_sums + added
        if part is not None:
            self.part_sums[part] = self.part_sums.get(part, 0.0) + added
        if self.metrics:
            for logits, chunk_targets in parallel.logits(self.net, tokens, targets):
                for metric in self.metrics.values():
                    metric.update(logits, chunk_targets)

    def take_evaluation(self, prefix: str) -> dict[str, Tensor]:
        """All that `evaluate` has added up, over all ranks, under its logged names; then 0 again.

        Empty where a subclass has evaluated in its own way. All ranks must call it.

        Raises:
            DataError: On all ranks, if no target of the set, or of a part of a mixture, counts.
        """
        values = {}
        if isinstance(self.eval_sums, Tensor):
            nats, n_tokens, *n_bytes = self.trainer.strategy.reduce(self.eval_sums, reduce_op="sum")
            self._check_counted(n_tokens, prefix)
            values = {"loss": nats / n_tokens, "perplexity": (nats / n_tokens).exp()}
            if n_bytes:
                values["bits_per_byte"] = nats / n_bytes[0] / math.log(2)
            for name, metric in self.metrics.items():
                values |= named_numbers(name, self._parallel().broadcast_metric(metric.compute))
                metric.reset()
            for part, sums in self.part_sums.items():  # in the same order on all ranks
                nats, n_tokens, *_ = self.trainer.strategy.reduce(sums, reduce_op="sum")
                self._check_counted(n_tokens, f"{prefix} (part {part})")
                values[f"{part}/loss"] = nats / n_tokens
            self.eval_sums, self.part_sums = 0.0, {}
        return {f"{prefix}/{name}": value for name, value in values.items()}

    def _check_counted(self, n_tokens: Tensor, name: str) -> None:
        """Raise a DataError if nothing was counted; a few batches of a sanity check may be so."""
        if float(n_tokens) == 0 and not self.trainer.sanity_checking:
            raise DataError(f"data.{name}: no target counts, all are -100")

    def named_net(self) -> dict[str, nn.Parameter]:
        """The net's parameters by their names in a checkpoint; of a pipeline this rank's."""
        return named_parameters(self.net, self._parallel().stages)

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer of the optimizer group over all that a module trains."""
        self.groups_read.add("optimizer")
        return self._optimizer_factory(module)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Build Lightning's lr_scheduler entry of the scheduler group, if there is one."""
        self.groups_read.add("scheduler")
        return self._schedule_factory(optimizer) if self._schedule_factory else None

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.make_optimizer(self)
        schedule = self.make_schedule(optimizer)
        if schedule is None:
            return optimizer
        entry = cast(LRSchedulerConfigType, {"interval": "step", **schedule})
        return {"optimizer": optimizer, "lr_scheduler": entry}

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Drops what training_step formed for itself; of a pipeline that is the gradients."""
        if not self._parallel().is_pipeline:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the norm over all ranks' shards, which Lightning's own clipping leaves out.

        Under 16-mixed Lightning leaves the scale of the loss in the gradients of an optimizer that
        can take it away itself, a fused one: clipped like that, they would vanish.
        """
        strategy = self.trainer.strategy
        if not isinstance(strategy, LightningStrategy) or gradient_clip_algorithm not in (
            None,
            "norm",
        ):
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        strategy.clip(optimizer, gradient_clip_val)

    def _parallel(self) -> ParallelStrategy:
        """What computes loss and metrics: of a strategy that is not ours, one device's."""
        with suppress(RuntimeError):  # attached to no trainer, as in a notebook
            if isinstance(strategy := self.trainer.strategy, LightningStrategy):
                return strategy.parallel
        return ParallelStrategy()


def has_own_optimizer(module: pl.LightningModule) -> bool:
    """Whether a module makes another optimizer than that of the optimizer group."""
    return type(module).configure_optimizers is not LanguageModel.configure_optimizers


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer and the learning rates that its schedule starts from."""
    rates = (group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups)
    shown = ", ".join(dict.fromkeys(f"{float(rate):g}" for rate in rates if rate is not None))
    return f"{type(optimizer).__name__} · lr {shown} · of the module's configure_optimizers"


def warn_of_ignored(module: pl.LightningModule, typed: Mapping[str, Any]) -> None:
    """Log one warning that names the typed options that the module's own optimizer ignores.

    Args:
        module: Module whose optimizer was built.
        typed: Key -> value of the typed options of the optimizer and the scheduler group.
    """
    read = module.groups_read if isinstance(module, LanguageModel) else set()
    ignored = {key: value for key, value in typed.items() if key.split(".")[0] not in read}
    if ignored:
        words = ", ".join(f"{key}={value}" for key, value in ignored.items())
        groups = " and the ".join(dict.fromkeys(key.split(".")[0] for key in ignored))
        reason = f"{type(module).__name__}.configure_optimizers does not use the {groups} group"
        log.warning("warning: %s: no effect; %s", words, reason)
