"""Replicas of a net that train by themselves for many steps before all meet (DiLoCo)."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gptrain.lit.strategies.base import BuildArgs
from gptrain.lit.strategies.data_parallel import SYNC_BUFFERS, Ranks
from gptrain.lit.strategies.states import from_saved_name, to_saved_name
from gptrain.parallel.dims import count_replicas
from gptrain.parallel.outer import OuterStep
from gptrain.parallel.slices import make_net_on
from gptrain.resilience.safe_load import load_file

log = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DiLoCo(Ranks):
    """Loss, clipping and optimizer are a replica's own between two meetings.

    A replica is a rank; or neighbours, a node's, that average their gradients at each step.

    They meet after every `sync_every`-th step of the run, where a step is validated, and after the
    last. A save holds what each replica is at that step, so that a run goes on bit for bit from the
    middle of a round too: the first one's in the checkpoint's own file, together with what they
    share, the others' in a file each.

    Args:
        options: the `strategy` group.
    """

    def __init__(self, options: Any):
        super().__init__()
        self.options, self.synced_step = options, 0
        self._shared: dict[str, Any] | None = None  # of a checkpoint

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        n = count_replicas(self.options.replicas, self.num_nodes, self.world_size)
        sizes, names = (n, self.world_size // n), ("replicas", "ranks")
        mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=names)
        self.meeting, self.replica = (mesh.get_group(name) for name in names)
        self.data_group = self.step_group = self.replica
        self.replicas = mesh["ranks"] if sizes[1] > 1 else None

    def configure_ddp(self) -> None:
        """Gradients are averaged within the replica."""
        if self.replica.size() > 1:
            options: dict[str, Any] = {SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
            self.model = DistributedDataParallel(
                cast(nn.Module, self.model),
                device_ids=self.determine_ddp_device_ids(),
                process_group=self.replica,
                **options,
            )

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        moved = {name: p for name, p in self.saved_parameters().items() if p.requires_grad}
        lr, momentum = self.options.outer_lr, self.options.outer_momentum
        dtype = DTYPES[self.options.outer_dtype]
        groups = self.meeting, self.replica
        self.outer = OuterStep(moved, *groups, lr=lr, momentum=momentum, dtype=dtype)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        returned = super().optimizer_step(optimizer, *args, **kwargs)
        step = self.trainer.global_step + 1  # Lightning counts it later
        if step % self.options.sync_every == 0 or step == self.trainer.max_steps:
            self._sync(step)
        return returned

    def on_validation_start(self) -> None:
        """What is validated, or saved with its loss, is all replicas' in common."""
        trainer, step = self.trainer, self.trainer.global_step
        is_within = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if is_within and self.synced_step != step:
            self._sync(step)

    def _sync(self, step: int) -> None:
        self.outer.sync()
        self.synced_step = step

    # States

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if self.saves_to_store:
            replicas = {"step": self.synced_step, "number": self.meeting.size()}
            checkpoint["replicas"] = replicas | self.outer.state()
            if self.meeting.rank() and self.replica.rank() == 0:
                weights, optimizer = checkpoint["state_dict"], self.optimizers[0].state
                parameters = self.saved_parameters()
                mine = {
                    "state_dict": {to_saved_name(name): weights[name] for name in weights},
                    "optimizer": {name: optimizer.get(p, {}) for name, p in parameters.items()},
                }
                with storage_options.open(replica_name(self.meeting.rank())) as file:
                    torch.save(mine, file)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """In a training what this replica was; on another number of them what the first was."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._shared = checkpoint.pop("replicas", None)
        if self._shared is None or self.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if self._shared["number"] != self.meeting.size():
            if self.is_global_zero:
                log.warning("all replicas go on with the first one's weights and optimizer")
        elif number := self.meeting.rank():
            mine = load_file(Path(checkpoint_path) / replica_name(number))
            weights = mine["state_dict"]
            checkpoint["state_dict"] = {from_saved_name(name): weights[name] for name in weights}
            checkpoint["optimizer_states"][0]["state"] = mine["optimizer"]
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._shared is not None:
            self.synced_step = self._shared["step"]
            self.outer.load(self._shared)
            self._shared = None


def replica_name(number: int) -> str:
    """The file of a checkpoint that holds the weights and the optimizer's state of one replica."""
    return f"replica-{number:04d}.ckpt"


def build_diloco(args: BuildArgs) -> tuple[nn.Module, Strategy]:
    """A copy of the net on every rank."""
    return make_net_on(args.device, args.make_net, args.finish), DiLoCo(args.options)
