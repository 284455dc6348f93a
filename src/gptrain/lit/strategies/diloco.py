"""When the replicas of DiLoCo meet in Lightning's loop, and what each leaves in a checkpoint."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from gptrain.checkpoints.safe_load import load_file
from gptrain.lit.strategies.base import Ranks
from gptrain.lit.strategies.saved_names import from_saved_names, to_saved_names
from gptrain.parallel import diloco

log = logging.getLogger(__name__)


class LightningDiLoCo(Ranks):
    """Replicas that train by themselves for many steps before all meet.

    They meet after every `sync_every`-th step of the run, where a step is validated, and after the
    last. A save holds what each replica is at that step, so that a run goes on bit for bit from the
    middle of a round too: the first one's in the checkpoint's own file, together with what they
    share, the others' in a file each.
    """

    has_replicas = True
    parallel: diloco.DiLoCo
    _shared: dict[str, Any] | None = None  # of a checkpoint

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        returned = super().optimizer_step(optimizer, *args, **kwargs)
        trainer = self.module.trainer
        step = trainer.global_step + 1  # Lightning counts it later
        if step % self.parallel.options.sync_every == 0 or step == trainer.max_steps:
            self.parallel.sync(step)
        return returned

    def on_validation_start(self) -> None:
        """What is validated, or saved with its loss, is all replicas' in common."""
        trainer = self.module.trainer
        is_within = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if is_within and self.parallel.synced_step != trainer.global_step:
            self.parallel.sync(trainer.global_step)

    # States

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self.saves_to_store:
            checkpoint["replicas"] = self.parallel.state()
            own = self.own_state()
            if own and not isinstance(storage_options, dict):
                own["state_dict"] = to_saved_names(checkpoint["state_dict"])
                with storage_options.open(replica_name(self.parallel.sync_group.rank())) as file:
                    torch.save(own, file)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank's replica, if that is not the first and this its rank 0."""
        if not self.parallel.sync_group.rank() or self.parallel.replica_group.rank():
            return {}
        parameters, state = self.saved_parameters(), self.optimizers[0].state
        return {
            "state_dict": to_saved_names(self.lightning_module_state_dict()),
            "optimizer": {name: state.get(p, {}) for name, p in parameters.items()},
        }

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """In a training what this replica was; on another number of them what the first was."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._shared = checkpoint.pop("replicas", None)
        if self._shared is None or self.module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if self._shared["number"] != self.parallel.sync_group.size():
            if self.is_global_zero:
                log.warning("all replicas go on with the first one's weights and optimizer")
        elif number := self.parallel.sync_group.rank():
            mine = load_file(Path(checkpoint_path) / replica_name(number))
            checkpoint["state_dict"] = from_saved_names(mine["state_dict"])
            checkpoint["optimizer_states"][0]["state"] = mine["optimizer"]
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._shared is not None:
            self.parallel.load(self._shared)
            self._shared = None


def replica_name(number: int) -> str:
    """The file of a checkpoint that holds the weights and the optimizer's state of one replica."""
    return f"replica-{number:04d}.ckpt"
