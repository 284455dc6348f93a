"""LanguageModel: any net of the models' contract, trained on next-token cross entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import SumMetric

from gptrain.lit.finite import FiniteCheck
from gptrain.lit.heap import trim_heap
from gptrain.lit.tied import share_gradient, tied_embedding
from gptrain.loss import IGNORED, chunked_next_token_loss, next_token_loss
from gptrain.parallel import clip_grad_norm

# B batch, T time, D d_model, V vocabulary

LARGE_BYTES = 2**26  # of a head: its step takes a hundred times longer than trimming


class LanguageModel(pl.LightningModule):
    """Wraps a net `tokens (B, T) -> logits (B, T, V)` with its loss, optimizer and schedule.

    A net that also offers `hidden` and `head` is trained by the chunked loss, which never holds
    the logits of a whole batch.

    Args:
        net: the net.
        make_optimizer: net -> optimizer, with its learning rate at the schedule's peak.
        schedule: optimizer step -> factor on the learning rate.
        token_bytes: (V,) bytes of text that each token stands for; opens `val/bits_per_byte`.
        on_nonfinite: "stop" ends the run at a loss that is not finite, "skip" leaves the step out.
        compiles_loss: compile the softmax of the chunked loss.
    """

    def __init__(
        self,
        net: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        schedule: Callable[[int], float],
        token_bytes: Tensor | None = None,
        on_nonfinite: str = "stop",
        compiles_loss: bool = False,
    ):
        super().__init__()
        self.net = net
        head = getattr(net, "head", None)
        self.in_chunks = (
            hasattr(net, "hidden") and isinstance(head, nn.Linear) and head.bias is None
        )
        self.tied = tied_embedding(net) if self.in_chunks else None
        self.spares_memory = False
        self.make_optimizer = make_optimizer
        self.schedule = schedule
        self.check_finite = FiniteCheck(on_nonfinite)
        self.compiles_loss = compiles_loss
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        # Sums: MeanMetric(nan_strategy="disable") leaves out its weights (torchmetrics 1.9).
        self.eval_nats, self.eval_tokens, self.eval_bytes = (
            SumMetric(nan_strategy="disable").set_dtype(torch.float64) for _ in range(3)
        )
        self.step_losses: list[Tensor] = []  # one detached scalar per micro-step of this step
        self.grad_norm: Tensor | None = None  # before clipping, of the last step
        self.learned_steps = 0  # of the checkpoint that is evaluated
        self.logged: dict[str, tuple[int, float]] = {}  # name -> its last point: step, value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # Lightning's, 50 times a step; nn.Module's way takes 4 us
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        return self.net(tokens)

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Next-token cross entropy in nats, over the targets that are not IGNORED."""
        if self.in_chunks:
            hidden, head = self.hidden_and_head(tokens)
            if self.spares_memory and torch.is_grad_enabled():
                trim_heap()  # the head's gradient and logits come on top of all activations
            return chunked_next_token_loss(
                hidden, head, targets, reduction=reduction, compiles=self.compiles_loss
            )
        logits = self.net(tokens)
        if logits.shape[:-1] != targets.shape:
            raise ValueError(
                f"{type(self.net).__name__} made {tuple(logits.shape)} of tokens "
                f"{tuple(tokens.shape)}; a net's forward returns logits (B, T, V)"
            )
        return next_token_loss(logits, targets, reduction=reduction)

    def hidden_and_head(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the chunked loss takes: (B, T, D) and (V, D)."""
        if self.tied is None or not self.spares_memory:
            return self.net.hidden(tokens), self.net.head.weight
        with share_gradient(self.tied) as shared:
            return self.net.hidden(tokens), shared.head

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch  # (B, T), (B, T)
        loss = self.loss(tokens, targets)
        self.step_losses.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(*batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(*batch)

    def on_validation_start(self) -> None:
        self.check_finite.settle()

    def on_train_end(self) -> None:
        self.check_finite.settle()

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:  # a few batches, before the first step
            self._log_evaluation("val")
        self._reset_evaluation()

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")
        self._reset_evaluation()

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.make_optimizer(self.net)
        # Found once, on the device that it is trained on: a walk over the net, 40 us in each step.
        self.learned = list(self.net.parameters())
        self.spares_memory = self.in_chunks and is_large(self.net.head.weight)
        scheduler = LambdaLR(optimizer, self.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]
    ) -> None:
        """Steps, and drops the gradients at once: kept until the next backward pass, as Lightning
        does, they would lie beside its activations, 4 bytes per parameter at the peak of memory.
        """
        optimizer.step(closure=optimizer_closure)
        optimizer.zero_grad()

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Nothing: they are gone since the last step."""

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the norm over all ranks' shards, which Lightning's own clipping leaves out.

        Under 16-mixed Lightning leaves the scale of the loss in the gradients of an optimizer that
        can take it away itself, a fused one: clipped like that, they would vanish.
        """
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        max_norm = math.inf if gradient_clip_val is None else float(gradient_clip_val)
        self.grad_norm = self.clip(max_norm)
        self.check_finite(self, optimizer)

    def clip(self, max_norm: float) -> Tensor:
        """Global norm of the gradients, clipped in place; a spread net's strategy puts its own."""
        return clip_grad_norm(self.learned, max_norm)

    def rate_after(self, step: int) -> float:
        """Learning rate of the optimizer step that follows this many, of the first group."""
        (scheduled,) = self.trainer.lr_scheduler_configs
        return scheduled.scheduler.base_lrs[0] * self.schedule(step)

    def take_train_loss(self) -> Tensor | None:
        """Mean loss of this rank over the micro-steps since the last call."""
        if not self.step_losses:
            return None
        loss = torch.stack(self.step_losses).mean()
        self.step_losses.clear()
        return loss

    def tell(self, metrics: dict[str, float]) -> None:
        """Logs points of this step with every logger."""
        step = self.trainer.global_step or self.learned_steps
        self.logged |= {name: (step, value) for name, value in metrics.items()}
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Stores the bare net's keys, so that a checkpoint loads into the net without us."""
        self.check_finite.settle()
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key.removeprefix("net."): value for key, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {f"net.{key}": value for key, value in state.items()}
        if self.trainer.state.fn != "fit":
            self.learned_steps = checkpoint["global_step"]
            checkpoint.pop("loops")  # of training; an evaluation begins at its first batch

    def _evaluate(self, tokens: Tensor, targets: Tensor) -> None:
        counted = targets != IGNORED  # (B, T)
        self.eval_nats.update(self.loss(tokens, targets, reduction="sum").double())
        self.eval_tokens.update(counted.sum())
        if self.token_bytes is not None:
            self.eval_bytes.update((self.token_bytes[targets.clamp(min=0)] * counted).sum())

    def _log_evaluation(self, prefix: str) -> None:
        nats = self.eval_nats.compute()  # of all ranks
        loss = nats / self.eval_tokens.compute()
        metrics = {f"{prefix}/loss": loss, f"{prefix}/perplexity": loss.exp()}
        if self.token_bytes is not None:
            metrics[f"{prefix}/bits_per_byte"] = nats / self.eval_bytes.compute() / math.log(2)
        # For callbacks that monitor; to the loggers it goes at the step it belongs to, which
        # Lightning's own logging counts one too low.
        self.log_dict(metrics, logger=False, add_dataloader_idx=False)
        self.tell({name: float(value) for name, value in metrics.items()})

    def _reset_evaluation(self) -> None:
        for metric in (self.eval_nats, self.eval_tokens, self.eval_bytes):
            metric.reset()


def is_large(head: Tensor) -> bool:
    """Whether, on a CPU, its memory is worth what sparing it costs in each micro-step: 0.1 ms to
    share a tied weight's gradient, 15 ms to trim the heap.
    """
    return head.device.type == "cpu" and head.nbytes > LARGE_BYTES
