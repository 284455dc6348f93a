"""Saving and loading of checkpoints, as a mixin for Lightning's strategies.

A checkpoint file names the net's tensors as the bare net does, and a tensor of the module outside
`net` with the prefix `module.`. Inside of Lightning's hooks a checkpoint has Lightning's own names
instead, so that callbacks that copy a module (EMA) work as in any Lightning project.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from gptrain.checkpoints.manifest import BASE, STATE_NAME
from gptrain.checkpoints.safe_load import SafeFileSystemReader, ShardWriter, load_file
from gptrain.lit.strategies.saved_names import NET, from_saved_names, to_saved_names
from gptrain.parallel import state as states
from gptrain.parallel.base import Parallel

INDEX_NAME = ".metadata"  # index file of torch.distributed.checkpoint, in sharded checkpoints only


@dataclass(frozen=True)
class BaseWeights:
    """Frozen weights of the net that are not saved in checkpoints, because a file has them already.

    Attributes:
        entry: Path and sha256 of this file. The manifest of each checkpoint contains both.
        names: Names of the frozen tensors in the net. A tied tensor appears under all of its names.
    """

    entry: dict[str, str]
    names: Set[str]


class SavingStrategy(Strategy):
    """Mixin for Lightning's strategies that saves and loads checkpoints of gptrain.

    A save is either unsharded or sharded. An unsharded save is one file, which rank 0 writes. In a
    sharded save every rank writes its shards of the net and of the optimizer state to files of its
    own; the one file of rank 0 then holds what is left, such as counters and options. Every
    strategy can load both kinds.

    Args:
        parallel: Object that partitions and trains the net.
        arguments: Positional arguments of Lightning's strategy.
        keywords: Keyword arguments of Lightning's strategy.

    Attributes:
        saves_to_store: True while a checkpoint of gptrain is saved. False while Lightning saves a
            file of its own, for example for ModelCheckpoint.
        fresh_options: Options of each parameter group as the config gives them, before a checkpoint
            replaced them. Set when a checkpoint is loaded.
        base: Frozen weights that checkpoints of gptrain leave out. None if checkpoints hold all.
    """

    saves_to_store = False
    base: BaseWeights | None = None
    fresh_options: list[dict[str, Any]]
    _loaded: Path  # file or folder of the checkpoint that was loaded last

    def __init__(self, parallel: Parallel, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.parallel = parallel

    @property
    def module(self) -> pl.LightningModule:
        """LightningModule of the run, without a DDP wrapper."""
        return cast(pl.LightningModule, self.lightning_module)

    @property
    def net(self) -> nn.Module:
        """Net of the LightningModule."""
        return self.module.get_submodule("net")

    @property
    def _writes_shards(self) -> bool:
        """True if the current save is sharded, so that `ShardWriter` writes the net's tensors."""
        return self.parallel.is_partitioned and self.saves_to_store

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the module by the names that they have in a checkpoint.

        Tied weights appear once. In a pipeline the dict has the parameters of this rank's stages
        only, and those of the module outside its net.
        """
        return states.saved_parameters(self.module, self.parallel.stages)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the part of the module's state dict that rank 0 writes to its file.

        All ranks must call this method. If every rank holds the full net, the result is the whole
        state dict, without the frozen weights in `base` if a checkpoint of gptrain is saved. In a
        sharded save the result has no tensors of the net. In an unsharded save of a partitioned net
        only rank 0 gets the net's tensors, on the CPU.
        """
        state = super().lightning_module_state_dict()
        if not self.parallel.is_partitioned:
            left_out = self._names_left_out if self.saves_to_store else ()
            return {key: value for key, value in state.items() if key not in left_out}
        extra = _without_net(state)
        if self._writes_shards:
            return extra
        net = states.full_net_state(self.net, self.parallel.stages)
        return {f"{NET}{name}": tensor for name, tensor in net.items()} | extra

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict with parameter names in place of parameter numbers.

        All ranks must call this method. In a sharded save the result has only the options of the
        parameter groups. In an unsharded save only rank 0 gets the tensors, on the CPU.

        Args:
            optimizer: Optimizer of the run.

        Raises:
            ValueError: If a parameter of the optimizer is not one of the module, or if an option of
                a parameter group is not a plain value.
        """
        parameters = self.saved_parameters()
        stages = self.parallel.stages
        if self._writes_shards:
            groups = states.named_groups(parameters, optimizer, stages)
            return {"state": {}, "param_groups": groups}
        return states.full_optimizer_state(parameters, optimizer, stages)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the state that Lightning has collected into a checkpoint or a file.

        All ranks must call this method. For a checkpoint, set `saves_to_store` before Lightning
        collects the state.

        Args:
            checkpoint: State dict that Lightning has collected. It is changed in place: its tensors
                get the names that they have in a checkpoint file.
            filepath: Path of the file, if `storage_options` is None. Otherwise ignored.
            storage_options: A CheckpointWriter saves a new checkpoint of gptrain. None writes one
                file in Lightning's own way, for example for
                ModelCheckpoint.

        Raises:
            ValueError: In a sharded save, if the optimizer's state has a value that is neither a
                tensor nor plain.
        """
        if self._writes_shards:
            dcp.save(self.own_state(), storage_writer=ShardWriter(storage_options))
        checkpoint["state_dict"] = to_saved_names(checkpoint["state_dict"])
        if storage_options is None:
            super().save_checkpoint(checkpoint, filepath)
            return
        if self.is_global_zero:
            with storage_options.open(STATE_NAME) as file:
                torch.save(checkpoint, file)

    def own_state(self) -> Any:
        """Return the state that this rank saves in files of its own: its shards.

        Returns:
            `net` (name -> tensor) and `optimizer` (name of the parameter -> name of the state, such
            as `exp_avg`, -> value). An empty dict if the net is not partitioned. Frozen tensors in
            `base` are left out.

        Raises:
            ValueError: If the optimizer's state has a value that is neither a tensor nor plain.
        """
        if not self.parallel.is_partitioned:
            return {}
        parameters = self.saved_parameters()
        stages = self.parallel.stages
        state = states.sharded_state(self.net, parameters, self.optimizers[0], stages)
        if self.base is not None:
            names = state["net"].keys() - self.base.names
            state["net"] = {name: state["net"][name] for name in sorted(names)}
        return state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Load the state file of a checkpoint of gptrain, or a file of Lightning's, on the CPU.

        The shards of a sharded checkpoint are read later, by `load_model_state_dict` and
        `load_optimizer_state_dict`.

        Args:
            checkpoint_path: Folder of a checkpoint, or path of a file.
            weights_only: Ignored. Only tensors and plain values are ever loaded.

        Returns:
            The content of the file, with the tensor names of the module's state dict.

        Raises:
            DamagedCheckpointError: If a file is damaged, or contains anything but tensors and plain
                values.
            FileNotFoundError: If the file is missing.
        """
        path = Path(checkpoint_path)
        self._loaded = path
        checkpoint = load_file(path / STATE_NAME if path.is_dir() else path)
        checkpoint["state_dict"] = from_saved_names(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's part of a checkpoint into the module. All ranks must call this method.

        Args:
            checkpoint: Result of `load_checkpoint`.
            strict: Whether names outside `net` must be equal. Names of the net always must, unless
                every rank holds the full net and the save is unsharded: then `strict` decides about
                all names. Frozen tensors in `base` may be missing in either case.

        Raises:
            ValueError: If the tensors of a partitioned or sharded net have other names or shapes
                than those of the module.
            RuntimeError: The same, if every rank holds the full net and the save is unsharded.
            DamagedCheckpointError: If a file of a sharded save is damaged.
        """
        reader = self._shard_reader()
        state = checkpoint["state_dict"]
        if reader is None and not self.parallel.is_partitioned:
            own = self.module.state_dict()
            state = {**{name: own[name] for name in self._names_left_out & own.keys()}, **state}
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
            return
        net = {n.removeprefix(NET): t for n, t in state.items() if n.startswith(NET)}
        optional = frozenset() if self.base is None else self.base.names
        states.load_net_state(
            self.net, reader or net, stages=self.parallel.stages, optional=optional
        )
        missing, unexpected = self.module.load_state_dict(_without_net(state), strict=False)
        unmatched = [name for name in missing if not name.startswith(NET)] + list(unexpected)
        if unmatched and strict:
            raise ValueError(
                f"{self._loaded}: does not fit the module outside its net; missing or unexpected: "
                f"{', '.join(unmatched)}"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer state from a checkpoint.

        Before that, the options of the parameter groups, as the config gives them, are copied to
        `fresh_options`. All ranks must call this method.

        Args:
            checkpoint: Dict that `load_checkpoint` returned. The states of the learning rate
                schedules in it are changed if the optimizer has another number of parameter groups
                than the saved one, as a stage of a pipeline may have.

        Raises:
            ValueError: If parameters of one group were saved in groups with different options, or
                if a parameter of the optimizer was not saved or is not one of the module.
            DamagedCheckpointError: If a file of a sharded save is damaged.
        """
        optimizer = self.optimizers[0]
        state = checkpoint["optimizer_states"][0]
        self.fresh_options = [states.options_of(group) for group in optimizer.param_groups]
        source = self._shard_reader() or state["state"]
        parameters = self.saved_parameters()
        states.load_optimizer_state(parameters, optimizer, source, state["param_groups"])
        groups = optimizer.param_groups  # a pipeline stage may have fewer groups than were saved
        for schedule in checkpoint["lr_schedulers"]:
            if len(schedule.get("base_lrs", groups)) != len(groups):
                schedule["base_lrs"] = [group["initial_lr"] for group in groups]
                schedule["_last_lr"] = [group["lr"] for group in groups]
                if "lr_lambdas" in schedule:
                    schedule["lr_lambdas"] = []

    @property
    def base_entries(self) -> dict[str, dict[str, str]]:
        """Entry for the manifest of a checkpoint that names the file of frozen weights left out.

        The dict has the key `base`, with path and sha256 of the file. It is empty if checkpoints
        hold all weights.
        """
        return {} if self.base is None else {BASE: self.base.entry}

    @property
    def _names_left_out(self) -> Set[str]:
        """Names in the module's state dict of the tensors that checkpoints leave out."""
        return set() if self.base is None else {f"{NET}{name}" for name in self.base.names}

    def _shard_reader(self) -> SafeFileSystemReader | None:
        """Return a reader of the loaded checkpoint's shards, or None if it is unsharded."""
        is_sharded = (self._loaded / INDEX_NAME).exists()
        return SafeFileSystemReader(self._loaded) if is_sharded else None


def _without_net(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a module's state dict that do not belong to its net."""
    return {name: value for name, value in state.items() if not name.startswith(NET)}
