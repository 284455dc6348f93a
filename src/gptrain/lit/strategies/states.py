"""Checkpoints by the names of the bare net, from and into every strategy; all are read safely.

In a file the net's tensors have the bare net's names, and what a module holds beside its net has
`module.` in front. Within Lightning's hooks a checkpoint has Lightning's own names, so that
callbacks that copy a module (EMA) find what they would find in any Lightning project.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import Optimizer

from gptrain.lit.strategies.base import NetStrategy, named_beside_net
from gptrain.parallel import state as states
from gptrain.parallel.state import BESIDE
from gptrain.resilience.manifest import STATE_NAME
from gptrain.resilience.safe_load import SafeFileSystemReader, load_file

INDEX_NAME = ".metadata"  # of torch.distributed.checkpoint: there in sharded checkpoints alone
NET = "net."


def to_saved_name(name: str) -> str:
    """`net.head.weight` of a module is `head.weight` in a file, `gain` is `module.gain`."""
    return name.removeprefix(NET) if name.startswith(NET) else f"{BESIDE}{name}"


def from_saved_name(name: str) -> str:
    """The module's own name of what a file calls so."""
    return name.removeprefix(BESIDE) if name.startswith(BESIDE) else f"{NET}{name}"


class NamedStates(NetStrategy):
    """How a net and its optimizer are saved and loaded.

    A sharded save keeps tensors in the ranks' own files; what is left, counters and options, is in
    the same file as that of a whole one. Either is read whatever this strategy itself would write.

    Attributes:
        partitions: the net is partitioned over ranks, so that its saves may be sharded.
        saves_to_store: what is being saved is one of our checkpoints, not a file of Lightning's.
        stages: of a pipeline.
        fresh_options: of the optimizer's groups as they were built, before a checkpoint's.
    """

    partitions = False
    saves_to_store = False
    stages = states.WHOLE
    fresh_options: list[dict[str, Any]]
    _loaded: Path

    @property
    def _writes_shards(self) -> bool:
        """Whether this save leaves the net's tensors to `ShardWriter`."""
        return self.partitions and self.saves_to_store

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Name in a checkpoint -> parameter, each once."""
        module = cast(LightningModule, self.lightning_module)
        net = getattr(module, "net", None)
        of_net = states.named_parameters(net, self.stages) if isinstance(net, nn.Module) else {}
        beside = {f"{BESIDE}{name}": p for name, p in named_beside_net(module).items()}
        return {**of_net, **beside}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on rank 0; in a sharded save what lies beside the net alone."""
        if not self.partitions:
            return super().lightning_module_state_dict()
        state = cast(LightningModule, self.lightning_module).state_dict()
        beside = {name: value for name, value in state.items() if not name.startswith(NET)}
        if self._writes_shards:
            return beside
        net = states.whole_net_state(self.net, self.stages)
        return {f"{NET}{name}": tensor for name, tensor in net.items()} | beside

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by names; in a sharded save the options of its groups alone."""
        parameters = self.saved_parameters()
        if self._writes_shards:
            groups = states.named_groups(parameters, optimizer, self.stages)
            return {"state": {}, "param_groups": groups}
        return states.whole_optimizer_state(parameters, optimizer, self.stages)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes Lightning's file, or into the draft of our store that comes as storage_options."""
        if self._writes_shards:
            import torch.distributed.checkpoint as dcp

            from gptrain.resilience.safe_load import ShardWriter

            parameters, optimizer = self.saved_parameters(), self.optimizers[0]
            shards = states.sharded_state(self.net, parameters, optimizer, self.stages)
            dcp.save(shards, storage_writer=ShardWriter(storage_options))
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {to_saved_name(name): state[name] for name in state}
        if storage_options is None:
            super().save_checkpoint(checkpoint, filepath)
        elif self.is_global_zero:
            with storage_options.open(STATE_NAME) as file:
                torch.save(checkpoint, file)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Tensors, on the CPU, and plain values; of a checkpoint's folder, or a file."""
        self._loaded = path = Path(checkpoint_path)
        checkpoint = load_file(path / STATE_NAME if path.is_dir() else path)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {from_saved_name(name): state[name] for name in state}
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        reader, state = self._reader(), checkpoint["state_dict"]
        if reader is None and not self.partitions:
            super().load_model_state_dict(checkpoint, strict)
            return
        net = {n.removeprefix(NET): t for n, t in state.items() if n.startswith(NET)}
        states.load_net_state(self.net, reader or net, stages=self.stages)
        beside = {name: value for name, value in state.items() if not name.startswith(NET)}
        module = cast(LightningModule, self.lightning_module)
        missing, unexpected = module.load_state_dict(beside, strict=False)
        lost = [name for name in missing if not name.startswith(NET)] + list(unexpected)
        if lost and strict:
            raise ValueError(f"{self._loaded} does not fit the module beside its net: {lost}")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        optimizer, state = self.optimizers[0], checkpoint["optimizer_states"][0]
        self.fresh_options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        source, parameters = self._reader() or state["state"], self.saved_parameters()
        states.load_optimizer_state(parameters, optimizer, source, state["param_groups"])
        groups = optimizer.param_groups  # of a pipeline's stage there may be fewer
        for schedule in checkpoint["lr_schedulers"]:
            if len(schedule.get("base_lrs", groups)) != len(groups):
                schedule["base_lrs"] = [group["initial_lr"] for group in groups]
                schedule["_last_lr"] = [group["lr"] for group in groups]
                schedule |= {"lr_lambdas": []} if "lr_lambdas" in schedule else {}

    def _reader(self) -> SafeFileSystemReader | None:
        if not (self._loaded / INDEX_NAME).exists():
            return None
        return SafeFileSystemReader(self._loaded)
