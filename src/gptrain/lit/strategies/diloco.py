"""DiLoCo in Lightning's loop: when the replicas synchronize, and how a checkpoint holds them.

DiLoCo trains several replicas of the net that exchange their weights only every some hundred steps.
An inner optimizer trains each replica, and an outer optimizer updates the common weights.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from gptrain.checkpoints.safe_load import load_file
from gptrain.lit.strategies.replicated import LightningMultiRank
from gptrain.lit.strategies.saved_names import from_saved_names, to_saved_names
from gptrain.parallel import diloco

log = logging.getLogger(__name__)


class LightningDiLoCo(LightningMultiRank):
    """Trains replicas of the net that synchronize only every `strategy.sync_every` steps.

    The replicas also synchronize before a validation and after step `trainer.max_steps`.

    A checkpoint holds the weights and the optimizer state of every replica, so that a run resumes
    bit for bit between two synchronizations as well. The first replica is saved in the state file,
    together with the state of the outer optimizer; every other replica is saved in a file of its
    own.
    """

    has_replicas = True
    parallel: diloco.DiLoCo
    _outer_state: dict[str, Any] | None = None  # loaded from a checkpoint, not yet applied

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run the inner optimizer's step, then synchronize the replicas if that is due.

        It is due after every `strategy.sync_every`-th step and after step `trainer.max_steps`. All
        ranks must call this method.

        Args:
            optimizer: Inner optimizer.
            args: Further arguments of Lightning's method.
            kwargs: Keyword arguments of Lightning's method.

        Returns:
            The result of Lightning's method.

        Raises:
            RefusedStepError: If this step, or the step before, was refused and the run ends because
                of it.
            DataError: If step 0 of the run has no target.
        """
        result = super().optimizer_step(optimizer, *args, **kwargs)
        trainer = self.module.trainer
        step = trainer.global_step + 1  # Lightning increases global_step after this hook
        if step % self.parallel.options.sync_every == 0 or step == trainer.max_steps:
            with self.parallel.clock.paused():
                self.conclude_step()  # the synchronization changes the weights
                self._synchronize_replicas(step)
        return result

    def on_validation_start(self) -> None:
        """Synchronize the replicas, so that all ranks validate the same weights.

        All ranks must call this method. It does nothing outside of a fit, in the sanity check, or
        if the replicas have synchronized after the last step.
        """
        trainer = self.module.trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if is_fitting and self.parallel.synced_step != trainer.global_step:
            self._synchronize_replicas(trainer.global_step)

    def _synchronize_replicas(self, step: int) -> None:
        """Synchronize the replicas' weights by a step of the outer optimizer, and their buffers.

        Afterwards all replicas have the same weights, and the buffers of the first replica. All
        ranks must call this method after the same step.

        Args:
            step: Number of optimizer steps that are complete.
        """
        self.parallel.sync(step)
        self.synchronize_buffers(self.parallel.sync_group)

    # Checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint, with a file for each replica if it is a new checkpoint of gptrain.

        All ranks must call this method.

        Args:
            checkpoint: State dict that Lightning has collected on this rank, changed in place.
            filepath: Path for Lightning's own file. Other saves ignore it.
            storage_options: A CheckpointWriter saves a new checkpoint of gptrain. A dict amends the
                newest one after its validation. None writes Lightning's own file.
        """
        if self.saves_to_store:
            checkpoint["replicas"] = self.parallel.state()
            replica_state = self.own_state()
            is_amendment = isinstance(storage_options, dict)
            if replica_state and not is_amendment:
                # A callback may have replaced the weights in `checkpoint`, by averages for example.
                replica_state["state_dict"] = to_saved_names(checkpoint["state_dict"])
                with storage_options.open(replica_name(self.parallel.sync_group.rank())) as file:
                    torch.save(replica_state, file)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def own_state(self) -> dict[str, Any]:
        """Return the weights and the optimizer state of this rank's replica, for a file of its own.

        Only the first rank of each replica writes such a file. The first replica has none, because
        the common state file holds it.

        Returns:
            `state_dict` and `optimizer` (name of the parameter -> name of the state, such as
            `exp_avg`, -> value), or an empty dict on a rank that writes no such file.
        """
        is_first_replica = self.parallel.sync_group.rank() == 0
        is_first_rank = self.parallel.replica_group.rank() == 0
        if is_first_replica or not is_first_rank:
            return {}
        state = self.optimizers[0].state
        return {
            "state_dict": to_saved_names(self.lightning_module_state_dict()),
            "optimizer": {name: state.get(p, {}) for name, p in self.saved_parameters().items()},
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Load a checkpoint with the weights and the optimizer state of this rank's replica.

        If the checkpoint has another number of replicas than this run, all replicas start from its
        first replica, and rank 0 logs a warning. Outside of a fit all ranks use the first replica.
        A checkpoint of another strategy has no replicas: all ranks use its weights.

        Args:
            checkpoint_path: Folder of a checkpoint, or path of a file.
            weights_only: Ignored. Only tensors and plain values are ever loaded.

        Returns:
            The content of the state file, with the tensor names of the module's state dict.

        Raises:
            DamagedCheckpointError: If a file is damaged, or contains anything but tensors and plain
                values.
            FileNotFoundError: If a file is missing.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._outer_state = checkpoint.pop("replicas", None)
        if self._outer_state is None or self.module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        replica = self.parallel.sync_group.rank()
        if self._outer_state["number"] != self.parallel.sync_group.size():
            if self.is_global_zero:
                log.warning(
                    "warning: the checkpoint has %d replicas; all replicas of this run resume with "
                    "the weights and the optimizer state of its first replica",
                    self._outer_state["number"],
                )
        elif replica != 0:
            saved = load_file(Path(checkpoint_path) / replica_name(replica))
            checkpoint["state_dict"] = from_saved_names(saved["state_dict"])
            checkpoint["optimizer_states"][0]["state"] = saved["optimizer"]
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of the inner optimizer, and of the outer one if the checkpoint has it.

        All ranks must call this method, after `load_checkpoint`.

        Args:
            checkpoint: Result of `load_checkpoint`.

        Raises:
            ValueError: If the saved parameter groups do not fit those of the optimizer.
        """
        super().load_optimizer_state_dict(checkpoint)
        if self._outer_state is not None:
            self.parallel.load(self._outer_state)
            self._outer_state = None


def replica_name(replica: int) -> str:
    """Return the name of the file in a checkpoint that holds a replica other than the first.

    Args:
        replica: Number of the replica, from 1.
    """
    return f"replica-{replica:04d}.ckpt"
