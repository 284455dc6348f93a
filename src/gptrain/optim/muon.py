"""Muon for the hidden matrices and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gptrain.optim.groups import muon_groups

# Jordan et al. 2024, kellerjordan.github.io/posts/muon: the quintic with the steepest slope at 0,
# and torch.optim.Muon's defaults.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NORM_FLOOR = 1e-7
ADAMW_RMS = 0.2  # size of AdamW's update, which Muon's is scaled to: arXiv:2502.16982, section 2.2


class Muon(torch.optim.Optimizer):
    """Muon over the groups flagged use_muon, torch.optim.AdamW over the others.

    torch.optim.Muon makes the same updates (adjust_lr_fn="match_rms_adamw"), but takes matrices
    only, and a training loop, a schedule and a checkpoint want one optimizer; it orthogonalizes one
    matrix at a time, in bf16 on any device; of a sharded matrix every product is a collective, and
    of a replicated one every rank computes the same. Here matrices of one shape are one batch,
    which the ranks that share them divide.

    Muon's update is scaled to the size of AdamW's, so that the learning rate and decay tuned for
    AdamW can be kept. A step of both takes 2 to 4 % of one of training (llama_nano, 16 k tokens,
    two ranks under DDP, one thread each, AVX512-BF16). What it stores and sends is stated without
    torch, for the planner, in `gptrain.costs.optimizers`.

    Args:
        params: groups as muon_groups() makes them; without the flag a group is AdamW's.
        betas, eps: AdamW's.   momentum: Muon's, of Nesterov's kind.
        fused: AdamW in one kernel; false on a device that has none.

    Attributes:
        replicas: ranks that hold the same weights and gradients; None: this process alone, or
            those of the weights' own mesh.
    """

    replicas: DeviceMesh | None = None

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        fused: bool = True,
    ):
        nothing = [{"params": []}]  # AdamW is shown its groups at each step
        self._adamw = torch.optim.AdamW(nothing, lr, betas, eps, weight_decay, fused=fused)
        self._muon_defaults = {"momentum": momentum}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})

    @classmethod
    def parameter_groups(
        cls,
        net: nn.Module,
        parameters: Iterable[nn.Parameter],
        names: Mapping[nn.Parameter, str],
        *,
        embedding_lr: float | None = None,
        head_lr: float | None = None,
        vector_lr: float | None = None,
    ) -> list[dict[str, Any]]:
        """Return the parameter groups that `gptrain` passes to this class; see `muon_groups`.

        Args:
            net: The model, whose `blocks` have the hidden matrices.
            parameters: All parameters that are trained, also those outside `net`.
            names: Names of the parameters of `net`.
            embedding_lr: Learning rate of embeddings. Defaults to `lr`, as the next two.
            head_lr: Learning rate of the head.
            vector_lr: Learning rate of biases and norms.

        Raises:
            ValueError: If `net` has no attribute `blocks`.
        """
        lrs = {"embedding": embedding_lr, "head": head_lr, "vector": vector_lr}
        return muon_groups(net, parameters, names, **lrs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer's; a group keeps the options of its own half only."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        defaults = self._muon_defaults if group["use_muon"] else self._adamw.defaults
        for name, value in defaults.items():
            group.setdefault(name, value)
        for parameter in group["params"]:
            if group["use_muon"] and parameter.ndim != 2:
                raise ValueError(
                    f"Muon: a parameter of shape {tuple(parameter.shape)} in a group with "
                    f"use_muon=True; it takes matrices only, leave others to AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both halves; the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Anew at each step: load_state_dict() replaces the groups and the state.
        self._adamw.state = self.state
        self._adamw.param_groups = [g for g in self.param_groups if not g["use_muon"]]
        self._adamw.step()
        for group in self.param_groups:
            if group["use_muon"]:
                self._muon_step(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        """Nesterov momentum, made orthogonal, scaled; decay as AdamW's."""
        alike: dict[tuple, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                sharding = (getattr(parameter, key, None) for key in ("device_mesh", "placements"))
                alike.setdefault((parameter.shape, *sharding), []).append(parameter)
        for (shape, *_), parameters in alike.items():
            step_size = group["lr"] * ADAMW_RMS * math.sqrt(max(shape))
            averages = [self._average(parameter, group["momentum"]) for parameter in parameters]
            updates = orthogonalize_shared(averages, self.replicas)
            for parameter, update in zip(parameters, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                held.add_(update, alpha=-step_size)

    def _average(self, parameter: Tensor, momentum: float) -> Tensor:
        """The gradient looked ahead by Nesterov's momentum."""
        state, gradient = self.state[parameter], cast(Tensor, parameter.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum)


def orthogonalize_shared(matrices: list[Tensor], replicas: DeviceMesh | None) -> list[Tensor]:
    """This rank's part of each of some matrices of one shape and sharding, made orthogonal.

    Each rank gets some of the matrices whole, and sends back what it has made of them: in two
    exchanges for all. Offloaded ones are gathered on their mesh's devices.

    Args:
        replicas: over which plain tensors are the same; they divide the work likewise.
    """
    first = matrices[0]
    mesh = first.device_mesh if isinstance(first, DTensor) else replicas
    if mesh is None:
        return list(orthogonalize(torch.stack(matrices), native_dtype(first.device)))
    device, home = torch.device(mesh.device_type), first.device
    dtype, whole, divided = native_dtype(device), [Replicate()] * mesh.ndim, [Shard(0)] * mesh.ndim
    stack = torch.stack([matrix.to(device.type, dtype) for matrix in matrices])
    if not isinstance(stack, DTensor):
        stack = DTensor.from_local(stack, mesh, whole, run_check=False)
    # gloo has no all_to_all, by which a DTensor goes from Shard(i) to Shard(0): there all is
    # gathered, then a part kept; and back axis by axis.
    is_gloo = device.type == "cpu"
    mine = stack.redistribute(placements=whole if is_gloo else divided)
    mine = mine.redistribute(placements=divided)
    made, size = orthogonalize(mine.to_local(), dtype).contiguous(), mine.size()
    made = DTensor.from_local(made, mesh, divided, shape=size, stride=mine.stride())
    for axis in reversed(range(mesh.ndim)) if is_gloo else ():
        made = made.redistribute(placements=[*divided[:axis], *whole[axis:]])
    return list(made.redistribute(placements=stack.placements).to_local().to(home))


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, rows, columns): to each the nearest with all singular values about 1 (0.7 to 1.2).

    Five Newton-Schulz steps, products only, in dtype.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrices.size(1) > matrices.size(2)
    wide = (matrices.mT if is_tall else matrices).to(dtype)  # the smaller product with itself
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=NORM_FLOOR)  # none above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, polynomial, wide, beta=a)
    return wide.mT if is_tall else wide


def native_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device has instructions for it, else fp32: V100 and T4 only emulate it."""
    has_bf16 = True
    if device.type == "cpu":
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
    elif device.type == "cuda" and torch.version.hip is None:
        has_bf16 = torch.cuda.get_device_capability(device)[0] >= 8  # Ampere
    return torch.bfloat16 if has_bf16 else torch.float32
