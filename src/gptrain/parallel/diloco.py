"""DiLoCo: replicas of the net that train independently and synchronize every `sync_every` steps.

The parameter change since the last synchronization, averaged over the replicas, is the
pseudo-gradient of an outer SGD with Nesterov momentum. All replicas continue from the weights that
the outer optimizer computes. Source: Douillard et al. 2023, arXiv:2311.08105. With outer_lr=1 and
outer_momentum=0 this is local SGD (Stich 2019, arXiv:1805.09767).
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
    """Train one of several replicas of the net, and synchronize them every `sync_every` steps.

    Between two synchronizations a replica has its own loss, clipping and optimizer steps. A replica
    is one rank, or several neighbouring ranks, usually those of a node, that average their
    gradients in each step. All ranks must call the constructor, which creates the process groups.

    Attributes:
        sync_group: Ranks with the same index in their replicas, one of each replica.
        replica_group: Ranks of this replica. Each sends a part of the pseudo-gradient.
        synced_step: Step after which the replicas synchronized last.
        parameters: Name in a checkpoint -> trained parameter, after `prepare`.
        anchors: Name in a checkpoint -> value after the last synchronization, after `prepare`.
        optimizer: Outer optimizer, which updates the anchors, after `prepare`.
    """

    synced_step = 0

    def __post_init__(self):
        world_size = self.dims.world_size
        n_replicas = count_replicas(self.options.replicas, self.n_nodes, world_size)
        n_ranks = world_size // n_replicas
        mesh = init_device_mesh(
            self.device.type, (n_replicas, n_ranks), mesh_dim_names=("replicas", "ranks")
        )
        self.sync_group = mesh.get_group("replicas")
        self.replica_group = mesh.get_group("ranks")
        self.data_group = self.replica_group
        self.step_group = self.replica_group
        if n_ranks > 1:
            self.replicas = mesh["ranks"]
            self.ddp_arguments = {
                SYNC_BUFFERS: False,
                "gradient_as_bucket_view": True,
                "process_group": self.replica_group,
            }

    def prepare(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Copy the trained parameters as anchors, and build the outer optimizer.

        The parameters must be identical on all replicas.

        Args:
            module: LightningModule, or any module with an attribute `net`. Its parameters that
                require gradients are synchronized.
            optimizer: Inner optimizer of this replica. If it has an attribute `replicas`, as Muon
                has, the attribute is set to the ranks that hold the same weights.
        """
        super().prepare(module, optimizer)
        self.parameters = {
            name: parameter
            for name, parameter in saved_parameters(module).items()
            if parameter.requires_grad
        }
        self.anchors = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self.parameters.items()
        }
        self.optimizer = torch.optim.SGD(
            self.anchors.values(),
            lr=self.options.outer_lr,
            momentum=self.options.outer_momentum,
            nesterov=self.options.outer_momentum > 0,
        )

    @torch.no_grad()
    def sync(self, step: int) -> None:
        """Synchronize the replicas by one step of the outer optimizer.

        Afterwards the weights of all replicas are bitwise equal. All ranks must call this method
        after the same step.

        Args:
            step: Number of optimizer steps that are complete, which becomes `synced_step`.
        """
        self.synced_step = step
        for name, anchor in self.anchors.items():
            anchor.grad = anchor - self.parameters[name]
        # Each rank of a replica averages a part of the pseudo-gradient over the replicas, and then
        # sends this part to the other ranks of its replica.
        anchors = list(self.anchors.values())
        n_ranks = self.replica_group.size()
        local_anchors = anchors[self.replica_group.rank() :: n_ranks]
        n_replicas = self.sync_group.size()
        dtype = DTYPES[self.options.outer_dtype]
        sum_gradients(local_anchors, self.sync_group, divisor=n_replicas, dtype=dtype)
        if n_ranks > 1:
            for index, anchor in enumerate(anchors):
                assert anchor.grad is not None  # set at the beginning of this method
                dist.broadcast(anchor.grad, group=self.replica_group, group_src=index % n_ranks)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, anchor in self.anchors.items():
            self.parameters[name].copy_(anchor)

    def extra_state(self) -> list[Tensor]:
        """Return the weights at the last synchronization and the outer momentum, for the planner.

        The planner counts their memory. There is no momentum before the first synchronization, or
        if the option `outer_momentum` is 0.
        """
        saved = self.state()
        return [*saved["anchors"].values(), *saved["momentum"].values()]

    def periodic_work(self) -> list[tuple[Callable[[], None], float]]:
        """Return the synchronization of the replicas, with the fraction of steps that call it.

        The planner adds this share of its cost to an average step. The list has one pair: the
        function and 1 / sync_every.
        """
        return [(partial(self.sync, 0), 1 / self.options.sync_every)]

    def state(self) -> dict[str, Any]:
        """Return the state that all replicas share, for a checkpoint.

        Returns:
            `step` (step of the last synchronization), `number` (number of replicas), `anchors` and
            `momentum` (name -> tensor). `momentum` is empty before the first synchronization, and
            if the outer optimizer has no momentum. The tensors are not copies.
        """
        momentum = {}
        for name, anchor in self.anchors.items():
            buffer = self.optimizer.state.get(anchor, {}).get("momentum_buffer")
            if buffer is not None:
                momentum[name] = buffer
        return {
            "step": self.synced_step,
            "number": self.sync_group.size(),
            "anchors": {name: anchor.detach() for name, anchor in self.anchors.items()},
            "momentum": momentum,
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore the outer optimizer, without the weights of the net, from a checkpoint.

        Call this method after `prepare`.

        Args:
            state: Dict that the method `state` returned: step of the last synchronization, anchors,
                and momentum of the outer optimizer. Its number of replicas is not compared.

        Raises:
            KeyError: If the state has no anchor for a trained parameter.
        """
        self.synced_step = state["step"]
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
            if name in state["momentum"]:
                buffer = state["momentum"][name].to(anchor, copy=True)
                self.optimizer.state[anchor]["momentum_buffer"] = buffer
