"""TrainingMonitor, the first callback of every run: it checks, logs and ends the training."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from gptrain.checkpoints.status import PreemptedError
from gptrain.lit.callbacks.checkpoints import Checkpoints
from gptrain.lit.callbacks.progress import ProgressBar
from gptrain.lit.callbacks.vote import Vote, may_vote_in_validation
from gptrain.lit.guard import StepGuard
from gptrain.lit.lightning import data_of, ends_step, is_validated, run_after_step, strategy_of
from gptrain.lit.loggers import STEP, JsonLinesLogger
from gptrain.lit.module import LanguageModel
from gptrain.lit.perf import Speed
from gptrain.lit.unsupported import check_supported
from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.runtime.watchdog import Guard


@dataclass(eq=False)
class TrainingMonitor(Callback):
    """Callback that logs the steps, and ends a run that was asked to stop or whose step is refused.

    It comes first, so that the other callbacks find the values of a step in
    `trainer.callback_metrics`. After the first step, after every `every_n_steps`-th step, after the
    last step and before each validation it logs

        train/loss            mean loss of the step's targets, in nats
        grad_norm             norm of all gradients before they are clipped
        lr                    learning rate of the first parameter group
        tokens                positions trained on since the run began
        step                  optimizer steps done, the x axis of all loggers
        perf/tokens_per_s     positions per second on all ranks, the mean of an interval
        perf/step_s           seconds per optimizer step, likewise
        perf/data_wait_s      seconds per step in which training waits for a batch
        perf/mfu              model FLOP/s of a device relative to its peak, on rank 0
        perf/gpu_mem_peak_gib peak memory on a CUDA device, in GiB

    by `self.log`, so that the values of modules and other callbacks appear in the same row. A name
    without `perf/` promises the same value after an exact resume.

    A run that was asked to stop during training saves its step and ends on all ranks at the same
    step, which the ranks choose by a vote, with a PreemptedError. Before the first step and in
    task=validate or task=test the rank that received the signal ends at once.

    Attributes:
        every_n_steps: Optimizer steps between two logged steps.
        model_config: `model` group of the config, which every checkpoint contains, so that a net
            can be built from it alone.
        guard: Watchdog of this rank. It has the flag that a stop signal sets, and counts the time
            of each phase.
        step_guard: Object that decides whether the optimizer takes each step.
        checkpoints: Callback that saves the run. None for a run without checkpoints.
        compile_s: Time that the watchdog allows for a phase that may compile the model, in seconds.
        seed: Seed of the run. In a fit each rank is seeded with the sum of it and the rank.
        first_step: Number of optimizer steps done when training started. None if it did not start.
        speed: Measurement of the values perf/*. It exists once training has started.
    """

    every_n_steps: int
    model_config: dict[str, Any]
    guard: Guard
    step_guard: StepGuard
    checkpoints: Checkpoints | None
    compile_s: float
    seed: int

    def __post_init__(self) -> None:
        self.first_step: int | None = None
        self._votes = Vote(1)  # on stopping, in a fit without checkpoints
        self._lr = 0.0  # learning rate of the last step, of the first parameter group
        self._is_paused = False  # a validation or a save has interrupted the measurement of speed

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise a ConfigError if the trainer has a callback that gptrain does not support."""
        check_supported(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed torch's generators with `seed` + rank. Until then all ranks draw the same."""
        # Until now all ranks drew the same numbers, for parameters of the module, also in its
        # `setup` and `configure_model`, and a random split of a LightningDataModule. Dropout
        # differs between ranks.
        torch.manual_seed(self.seed + trainer.global_rank)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare loggers, `step_guard` and the measurement of speed for the first step.

        Raises:
            IncompatibleModelError: If the module has `automatic_optimization=False`.
            PreemptedError: If this rank was asked to stop.
        """
        self.guard.leave_if_asked()
        self.guard.beat(trainer.global_step, "first step", allow_s=self.compile_s)
        if not pl_module.automatic_optimization:
            message = "automatic_optimization=False; use one optimizer with parameter groups"
            raise IncompatibleModelError("module._target_", message)
        self.step_guard.start(trainer)
        # Lightning will call `LanguageModel.clip_gradients`, and so `strategy.clip`, also without
        # a largest norm. In all other cases this callback measures the norm.
        self._clips_itself = is_overridden("configure_gradient_clipping", pl_module)
        is_other = self._clips_itself or trainer.gradient_clip_algorithm == "value"
        self._measures_norm = is_other or not isinstance(pl_module, LanguageModel)
        self.first_step = trainer.global_step
        for logger in trainer.loggers:
            if discard := getattr(logger, "discard_after", None):
                discard(self.first_step)
        self.speed = Speed(trainer)
        if (checkpoints := self.checkpoints) is not None:
            run_after_step(pl_module, lambda _, __, idx: checkpoints.end_micro_step(trainer, idx))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step of the epoch before, if it is due."""
        if self.checkpoints is not None:
            self.checkpoints.save_if_due(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """End the run by a PreemptedError, if it was asked to stop and the step is saved."""
        cast(Any, trainer).log_every_n_steps = self.every_n_steps
        self._leave_if_agreed(trainer)
        if self._is_paused:  # do not count a validation or a save as training time
            self.speed.start()
            self._is_paused = False

    def _leave_if_agreed(self, trainer: Trainer) -> None:
        """Raise a PreemptedError if the ranks have agreed to stop and nothing is left to save."""
        if self.checkpoints is not None:
            self.checkpoints.leave_if_saved(trainer)
        elif self._votes.ask(bool(self.guard.stop))[0]:
            self._votes.close()  # no rank may end while another one still begins this vote
            raise PreemptedError

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Complete the gradients before other hooks see them. Collective.

        Measures their norm, too, unless `LanguageModel.clip_gradients` will do it.
        """
        self._lr = optimizer.param_groups[0].get("lr", 0.0)
        strategy = strategy_of(trainer)
        strategy.finish_gradients()
        if self._measures_norm:
            strategy.clip(optimizer, None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Send a heartbeat. After the last micro-batch of a step log the step, if it is due.

        Before that, all ranks synchronize buffers.
        """
        step = trainer.global_step
        self.guard.beat(step, "train")
        if not ends_step(trainer, batch_idx):
            return
        strategy = strategy_of(trainer)
        if self._clips_itself:
            strategy.parallel.check_gradients()
        strategy.synchronize_buffers()
        if step == data_of(trainer).lengths.n_steps:
            trainer.should_stop = True  # makes Lightning validate and log, whatever the intervals
        is_due = step % self.every_n_steps == 0 or step - 1 == self.first_step
        if is_due or is_validated(trainer, step) or trainer.should_stop:
            cast(Any, trainer).log_every_n_steps = 1  # on_train_batch_start sets it back
            self._log_step(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the step as the x axis of values that are logged at the end of an epoch."""
        pl_module.log(STEP, float(trainer.global_step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise the errors of `StepGuard.read` for the last step."""
        self.guard.beat(phase="end")
        self._votes.close()
        self.step_guard.read()

    # Evaluations

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the step before its validation, and end the run if it was asked to stop.

        In a sanity check and outside of a fit it only sends a heartbeat.
        """
        is_of_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        if self.checkpoints is not None and is_of_fit:
            # Before the other callbacks, which may replace the weights for the validation
            self.checkpoints.save(trainer)
            self.checkpoints.leave_if_saved(trainer)
        self.guard.beat(phase="validate", allow_s=self.compile_s)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Send a heartbeat, and end a run that saves nothing if it was asked to stop."""
        self.guard.beat(phase="test" if trainer.testing else "validate")
        if trainer.state.fn != "fit":
            self.guard.leave_if_asked()
        elif self.checkpoints is None and may_vote_in_validation(trainer):
            self._leave_if_agreed(trainer)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values of `LanguageModel.take_evaluation`, and the step as their x axis.

        For another module only the step is logged. Raises the DataError of `take_evaluation`.
        """
        # Log here and not in a hook of the module, which a subclass may override.
        part = "test" if trainer.testing else "val"
        values = pl_module.take_evaluation(part) if isinstance(pl_module, LanguageModel) else {}
        # Log in the sanity check too: a value that cannot be logged then fails before training.
        step = trainer.global_step or self.guard.step  # in task=validate that of the checkpoint
        pl_module.log_dict({**values, STEP: float(step)}, add_dataloader_idx=False)

    on_test_epoch_end = on_validation_epoch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Return to the training phase. The time of the validation is not counted as steps."""
        self._is_paused = True
        self.guard.beat(phase="train")

    # Checkpoints

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the config of the net to a checkpoint, under the key `model`.

        Raises the errors of `StepGuard.read`, so that no file is written after a step that ends the
        run.
        """
        self.step_guard.read()
        checkpoint["model"] = self.model_config
        self._is_paused = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `step_guard`, for a checkpoint."""
        return self.step_guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of `step_guard`."""
        self.step_guard.load_state_dict(state_dict)

    def _log_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values of a step, which the class describes."""
        self.step_guard.read()
        strategy = strategy_of(trainer)
        values: dict[str, Any] = {}
        if strategy.step_mean.losses and strategy.step_mean.n_targets != 0:
            values["train/loss"] = strategy.step_mean.loss
        if strategy.grad_norm is not None:
            values["grad_norm"] = strategy.grad_norm
        values |= {"lr": self._lr, STEP: trainer.global_step, **self.speed.read()}
        bar = trainer.progress_bar_callback
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                # Lightning's float32 cannot count billions of tokens exactly.
                value = torch.tensor(value, dtype=torch.float64)
            # With prog_bar=True Lightning reads the loss from its device at every micro-batch.
            # gptrain's own bar reads the loss only if it shows the step.
            in_bar = name == "train/loss" and not isinstance(bar, ProgressBar | None)
            pl_module.log(name, value, sync_dist=name == "train/loss", prog_bar=in_bar)
        if isinstance(bar, ProgressBar):
            bar.show_step(trainer, values)
        # Lightning passes the values to the loggers after the save of the step. If the run fails in
        # between, no later start logs this step.
        for logger in trainer.loggers:
            if isinstance(logger, JsonLinesLogger):
                logger.log_metrics(values, trainer.global_step)
