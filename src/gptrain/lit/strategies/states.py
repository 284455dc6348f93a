"""Checkpoints by the names of the bare net, from and into every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.optim import Optimizer

from gptrain.parallel.state import (
    load_sharded_net,
    load_sharded_optimizer,
    load_whole_net_state,
    load_whole_optimizer_state,
    named_groups,
    named_parameters,
    sharded_state,
    whole_net_state,
    whole_optimizer_state,
)

INDEX_NAME = ".metadata"  # of torch.distributed.checkpoint: there in sharded checkpoints alone


class NamedStates:
    """What our strategies add to Lightning's: how a net and its optimizer are saved and loaded.

    A sharded save keeps tensors in the ranks' own files; what is left, counters and options, is in
    the same file as that of a whole one. Either is read whatever this strategy itself would write.
    """

    saves_shards = False
    aliases: Mapping[str, str] = {}
    stages: dist.ProcessGroup | None = None
    _loaded: Path

    @property
    def net(self) -> nn.Module:
        """The net that is trained."""
        return self.lightning_module.net

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that an optimizer may have, by their names in a checkpoint."""
        return named_parameters(self.net, self.aliases)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole net on rank 0, nothing elsewhere and in a sharded save."""
        if self.saves_shards:
            return {}
        state = whole_net_state(self.net, aliases=self.aliases, stages=self.stages)
        return {f"net.{name}": tensor for name, tensor in state.items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by names; in a sharded save the options of its groups alone."""
        optimizer = _bare(optimizer)
        if self.saves_shards:
            groups = named_groups(self.parameters, optimizer, self.stages)
            return {"state": {}, "param_groups": groups}
        return whole_optimizer_state(self.parameters, optimizer, stages=self.stages)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint into the draft that comes as storage_options."""
        if self.saves_shards:
            import torch.distributed.checkpoint as dcp

            from gptrain.resilience.sharded import ShardWriter

            optimizer = _bare(self.optimizers[0]) if self.optimizers else None
            state = sharded_state(self.net, self.parameters, optimizer, aliases=self.aliases)
            dcp.save(state, storage_writer=ShardWriter(storage_options))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        self._loaded = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._reader() is not None:
            load_sharded_net(self.net, self._reader(), aliases=self.aliases, stages=self.stages)
        else:
            state = checkpoint["state_dict"]
            state = {name.removeprefix("net."): tensor for name, tensor in state.items()}
            load_whole_net_state(self.net, state, aliases=self.aliases, stages=self.stages)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        optimizer, state = _bare(self.optimizers[0]), checkpoint["optimizer_states"][0]
        if self._reader() is not None:
            groups, reader = state["param_groups"], self._reader()
            load_sharded_optimizer(self.parameters, optimizer, groups, reader)
        else:
            load_whole_optimizer_state(self.parameters, optimizer, state)

    def _reader(self):
        from gptrain.resilience.safe_load import SafeFileSystemReader

        if not (self._loaded / INDEX_NAME).exists():
            return None
        return SafeFileSystemReader(self._loaded)


def _bare(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
