"""Saves the run so that it can go on bit for bit: after a validation, or between two."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from gptrain.lit.finite import gather
from gptrain.lit.module import LanguageModel
from gptrain.resilience.rng import capture, restore
from gptrain.resilience.store import CheckpointStore


class Checkpoints(Callback):
    """One save per step at most: where a step is validated, after that, with its metrics.

    Args:
        store: the run's checkpoints.
        identity: key -> value of what must not change on a resume; kept in each manifest.
        every_n_steps: between validations too; None: only after them.
        keep: newest ones kept, besides the one with the lowest `monitor`.
        validate_every: steps between validations.
        n_steps: of the run; its last step is always saved.
    """

    def __init__(
        self,
        store: CheckpointStore,
        identity: dict[str, Any],
        *,
        every_n_steps: int | None,
        keep: int,
        monitor: str,
        validate_every: int,
        n_steps: int | None,
    ):
        self.store, self.identity = store, identity
        self.every_n_steps, self.keep, self.monitor = every_n_steps, keep, monitor
        self.validate_every, self.n_steps = validate_every, n_steps
        self.saved_step = -1

    def on_train_start(self, trainer: Trainer, module: LanguageModel) -> None:
        """Puts back this rank's random numbers; nothing random happens between here and a step."""
        self.saved_step = trainer.global_step
        if self._rng is not None:
            restore(self._rng[trainer.global_rank % len(self._rng)])

    _rng: list[dict[str, Any]] | None = None

    def on_save_checkpoint(
        self, trainer: Trainer, module: LanguageModel, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["rng"] = gather(capture())

    def on_load_checkpoint(
        self, trainer: Trainer, module: LanguageModel, checkpoint: dict[str, Any]
    ) -> None:
        self._rng = checkpoint.get("rng")

    def on_train_batch_end(
        self, trainer: Trainer, module: LanguageModel, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if trainer.fit_loop._should_accumulate() or self._is_validated(trainer, step):
            return
        if step == self.n_steps or (self.every_n_steps and step % self.every_n_steps == 0):
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, module: LanguageModel) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
            self.save(trainer, {key: metrics[key] for key in metrics if key.startswith("val/")})

    def save(self, trainer: Trainer, metrics: dict[str, float] | None = None) -> None:
        """Saves this step, once; all ranks must call it.

        Raises: SaveFailed, on all ranks alike, with the earlier checkpoints intact.
        """
        step = trainer.global_step
        if step == self.saved_step:
            return
        sharded = getattr(trainer.strategy, "saves_shards", False)
        with self.store.writing(
            step,
            kind="sharded" if sharded else "full",
            config=self.identity,
            metrics=metrics,
            rank=trainer.global_rank,
            gather=gather,
        ) as draft:
            trainer.save_checkpoint(draft.path, weights_only=False, storage_options=draft)
        self.saved_step = step
        if trainer.is_global_zero:
            best = self.store.best(self.monitor, "min")
            self.store.prune(self.keep, protect=[best.path] if best else [])

    def _is_validated(self, trainer: Trainer, step: int) -> bool:
        if not trainer.enable_validation:
            return False
        return step == self.n_steps or step % self.validate_every == 0
