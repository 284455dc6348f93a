"""The outer step of DiLoCo: replicas that train by themselves meet now and then.

What each has moved since the last meeting, in the mean, is a gradient for SGD with Nesterov
momentum, and where that arrives all go on. Source: Douillard et al. 2023, arXiv:2311.08105; with
lr=1 and no momentum it is local SGD (Stich 2019, arXiv:1805.09767).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gptrain.parallel.gradients import sum_gradients


class OuterStep:
    """Brings the replicas' parameters together.

    Args:
        parameters: by names, alike on all replicas; here and now they start from the same.
        group: of each replica the rank that has this one's place in it.
        replica: the ranks of this one; each exchanges a part of what it has moved.
        dtype: in which they send what they have moved.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        replica: dist.ProcessGroup,
        *,
        lr: float,
        momentum: float,
        dtype: torch.dtype,
    ):
        self.parameters, self.dtype = parameters, dtype
        self.group, self.replica = group, replica
        # Where all replicas were after the last meeting.
        self.anchors = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
        self.optimizer = torch.optim.SGD(
            self.anchors.values(), lr=lr, momentum=momentum, nesterov=momentum > 0
        )

    @torch.no_grad()
    def sync(self) -> None:
        """Afterwards all replicas have the same weights, bit for bit. All must call it."""
        for name, anchor in self.anchors.items():
            anchor.grad = anchor - self.parameters[name]
        anchors, n_parts = list(self.anchors.values()), self.replica.size()
        mine = anchors[self.replica.rank() :: n_parts]
        sum_gradients(mine, self.group, divisor=self.group.size(), dtype=self.dtype)
        for number, anchor in enumerate(anchors if n_parts > 1 else ()):
            assert anchor.grad is not None  # of above
            dist.broadcast(anchor.grad, group=self.replica, group_src=number % n_parts)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for name, anchor in self.anchors.items():
            self.parameters[name].copy_(anchor)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Anchors and momentum by names."""
        momentum = {
            name: state["momentum_buffer"]
            for name, anchor in self.anchors.items()
            if (state := self.optimizer.state.get(anchor, {})).get("momentum_buffer") is not None
        }
        return {"anchors": {n: p.detach() for n, p in self.anchors.items()}, "momentum": momentum}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Takes what `state` returned."""
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
            if name in state["momentum"]:
                buffer = state["momentum"][name].to(anchor, copy=True)
                self.optimizer.state[anchor]["momentum_buffer"] = buffer
