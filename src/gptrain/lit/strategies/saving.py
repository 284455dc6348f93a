"""Saving and loading of checkpoints, as a mixin for Lightning's strategies.

The weights and the optimizer state of a checkpoint are in safetensors files, which have the names
of the bare net (`parallel.state.saved_name`). Everything else that Lightning collects is in one
more file. Inside of Lightning's hooks the tensors have Lightning's own names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from gptrain.checkpoints.manifest import REST_NAME, Manifest
from gptrain.checkpoints.save import Save
from gptrain.checkpoints.tensors import MODEL, OPTIMIZER, SavedTensors, load_file
from gptrain.parallel import state as states
from gptrain.parallel.base import Parallel
from gptrain.parallel.mesh import gather
from gptrain.parallel.requirements import tied_names

# Entries of Lightning with what `save_hyperparameters` has found: objects of any class, often the
# net. The config of the run has them.
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type")


class SavingStrategy(Strategy):
    """Mixin for Lightning's strategies that saves and loads checkpoints of gptrain.

    Attributes:
        parallel: Object that partitions the net and computes losses and gradients.
        full_net: Net before it was partitioned, on the meta device. `build_strategy` sets it.
        module: LightningModule of the run, without a DDP wrapper.
        fresh_options: Options of each parameter group as the config gives them, before a checkpoint
            replaced them. It exists once a checkpoint was loaded.
    """

    full_net: nn.Module
    fresh_options: list[dict[str, Any]]
    _loaded: Path  # file or folder of the checkpoint that was loaded last

    def __init__(self, parallel: Parallel, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.parallel = parallel

    @property
    def module(self) -> pl.LightningModule:
        """LightningModule of the run, without a DDP wrapper."""
        return cast(pl.LightningModule, self.lightning_module)

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the module by the names that they have in a checkpoint.

        Tied weights appear once. In a pipeline the dict has the parameters of this rank's stage
        only, and those of the module outside its net. Frees full weights that FSDP has gathered.
        """
        states.reshard(self.module)
        return {states.saved_name(name): p for name, p in self.module.named_parameters()}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict: its tensors, or this rank's shards, without a copy."""
        states.reshard(self.module)
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the optimizer by names, as `state.optimizer_state` does."""
        parameters = self.saved_parameters()
        return states.optimizer_state(parameters, optimizer, self.parallel.stage_group)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the state that Lightning has collected. All ranks must call this method.

        When `Checkpoints` saves, `storage_options` is a function that takes the tensors (MODEL or
        OPTIMIZER -> name -> tensor) and the rest. Otherwise, as for ModelCheckpoint, the state goes
        to `filepath`: into a file of Lightning, or for a partitioned net into a folder like a
        checkpoint of gptrain.
        """
        if storage_options is None and not self.parallel.is_partitioned:
            if "optimizer_states" in checkpoint:  # in the form that plain Lightning reads
                checkpoint["optimizer_states"] = [each.state_dict() for each in self.optimizers]
            super().save_checkpoint(checkpoint, filepath)
            return
        for key in _HYPERPARAMETERS:
            checkpoint.pop(key, None)
        further, named = tied_names(self.module), checkpoint.pop("state_dict").items()
        tensors = {MODEL: {states.saved_name(n): t for n, t in named if n not in further}}
        for state in checkpoint.get("optimizer_states", ()):
            tensors[OPTIMIZER] = state.pop("tensors")
        if storage_options is not None:
            storage_options(tensors, checkpoint)
            return
        path, rank = Path(self.broadcast(filepath)), self.global_rank  # ty: ignore[missing-attribute]
        save = Save(path, Manifest(run_id="", step=checkpoint["global_step"]), rank, gather)
        save.begin(tensors, checkpoint, in_background=False)
        save.finish()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Return the state that Lightning has collected for a checkpoint.

        For a checkpoint of gptrain, a folder, it has the full tensors of the module, unless the net
        is partitioned: then `load_model_state_dict` reads this rank's part. A file of Lightning is
        returned as it is. Raises a DamagedCheckpointError or an OSError.
        """
        self._loaded = path = Path(checkpoint_path)
        if not path.is_dir():
            return load_file(path)
        checkpoint = load_file(path / REST_NAME)
        tensors = {} if self.parallel.is_partitioned else SavedTensors(path).full()
        state = {states.module_name(name): tensor for name, tensor in tensors.items()}
        tied = tied_names(self.module).items()
        state |= {second: state[first] for second, first in tied if first in state}
        checkpoint["state_dict"] = state
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's part of a checkpoint into the module. All ranks must call it.

        Raises a ValueError for a partitioned net if `strict` is true and names or shapes differ.
        """
        if not self.parallel.is_partitioned:
            super().load_model_state_dict(checkpoint, strict)
            return
        source, options = SavedTensors(self._loaded), {"strict": strict, "is_module": True}
        states.load_net_state(self.module, source, full_net=self.full_net, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer's state, and set `fresh_options` before.

        In `checkpoint`, the state of a LambdaLR is fitted to the groups of this rank. Raises the
        errors of `state.load_optimizer_state`.
        """
        optimizer = self.optimizers[0]
        state = checkpoint["optimizer_states"][0]
        self.fresh_options = [states.options_of(group) for group in optimizer.param_groups]
        source = SavedTensors(self._loaded, OPTIMIZER)
        states.load_optimizer_state(self.saved_parameters(), optimizer, source, state)
        groups = optimizer.param_groups  # a pipeline stage may have fewer groups than were saved
        for schedule in checkpoint["lr_schedulers"]:
            if len(schedule.get("lr_lambdas", groups)) != len(groups):
                schedule["lr_lambdas"] = []
