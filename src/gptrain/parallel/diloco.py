"""DiLoCo: replicas of a net that train by themselves for many steps before all meet.

What each has moved since the last meeting, in the mean, is a gradient for SGD with Nesterov
momentum, and where that arrives all go on. Source: Douillard et al. 2023, arXiv:2311.08105; with
lr=1 and no momentum it is local SGD (Stich 2019, arXiv:1805.09767).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from gptrain.core.strategies import DiLoCoOptions, count_replicas
from gptrain.parallel.ddp import SYNC_BUFFERS
from gptrain.parallel.gradients import sum_gradients
from gptrain.parallel.state import saved_parameters
from gptrain.parallel.strategy import ParallelStrategy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DiLoCo(ParallelStrategy[DiLoCoOptions]):
    """Loss, clipping and optimizer are a replica's own between two meetings.

    A replica is a rank; or neighbours, a node's, that average their gradients at each step.

    Attributes:
        meeting: of each replica the rank that has this one's place in it.
        replica: the ranks of this one; each exchanges a part of what it has moved.
        synced_step: after which they met last.
    """

    synced_step = 0

    def __post_init__(self):
        world_size = self.dims.world_size
        n = count_replicas(self.options.replicas, self.n_nodes, world_size)
        sizes, names = (n, world_size // n), ("replicas", "ranks")
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        self.sync_group, self.replica_group = (mesh.get_group(name) for name in names)
        self.data_group = self.step_group = self.replica_group
        if sizes[1] > 1:
            self.replicas = mesh["ranks"]
            self.ddp_arguments = {SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
            self.ddp_arguments |= {"process_group": self.replica_group}

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Takes the parameters, which are alike on all replicas, for those of a meeting."""
        super().prepare(module, optimizer)
        options, named = self.options, saved_parameters(module).items()
        self.parameters = {name: p for name, p in named if p.requires_grad}
        # Where all replicas were after the last meeting.
        self.anchors = {n: nn.Parameter(p.detach().clone()) for n, p in self.parameters.items()}
        self.optimizer = torch.optim.SGD(
            self.anchors.values(),
            lr=options.outer_lr,
            momentum=options.outer_momentum,
            nesterov=options.outer_momentum > 0,
        )

    @torch.no_grad()
    def sync(self, step: int) -> None:
        """After this step all replicas have the same weights, bit for bit. All must call it."""
        self.synced_step = step
        for name, anchor in self.anchors.items():
            anchor.grad = anchor - self.parameters[name]
        anchors, n_parts = list(self.anchors.values()), self.replica_group.size()
        mine = anchors[self.replica_group.rank() :: n_parts]
        dtype = DTYPES[self.options.outer_dtype]
        sum_gradients(mine, self.sync_group, divisor=self.sync_group.size(), dtype=dtype)
        for number, anchor in enumerate(anchors if n_parts > 1 else ()):
            assert anchor.grad is not None  # of above
            dist.broadcast(anchor.grad, group=self.replica_group, group_src=number % n_parts)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, anchor in self.anchors.items():
            self.parameters[name].copy_(anchor)

    def extra_state(self) -> list[Tensor]:
        """Return the weights at the last synchronization, and the outer momentum."""
        saved = self.state()
        return [*saved["anchors"].values(), *saved["momentum"].values()]

    def periodic_work(self) -> list[tuple[Callable[[], None], float]]:
        return [(partial(self.sync, 0), 1 / self.options.sync_every)]

    def state(self) -> dict[str, Any]:
        """When they met and how many they are; anchors and momentum by names."""
        momentum = {
            name: state["momentum_buffer"]
            for name, anchor in self.anchors.items()
            if (state := self.optimizer.state.get(anchor, {})).get("momentum_buffer") is not None
        }
        anchors = {name: anchor.detach() for name, anchor in self.anchors.items()}
        counts = {"step": self.synced_step, "number": self.sync_group.size()}
        return counts | {"anchors": anchors, "momentum": momentum}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Takes what `state` returned."""
        self.synced_step = state["step"]
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
            if name in state["momentum"]:
                buffer = state["momentum"][name].to(anchor, copy=True)
                self.optimizer.state[anchor]["momentum_buffer"] = buffer
