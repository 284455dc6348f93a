"""Muon for the hidden matrices and AdamW for the rest, as one optimizer."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

# Jordan et al. 2024, kellerjordan.github.io/posts/muon: the quintic with the steepest slope at 0,
# and torch.optim.Muon's defaults.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NORM_FLOOR = 1e-7
ADAMW_RMS = 0.2  # size of AdamW's update, which Muon's is scaled to: arXiv:2502.16982, section 2.2


class Muon(torch.optim.Optimizer):
    """Muon over the groups flagged use_muon, torch.optim.AdamW over the others.

    torch's own Muon takes matrices only, and a training loop, a schedule and a checkpoint want one
    optimizer. It also works in bf16 whatever the device, which a CPU without instructions for it
    computes 100 times slower than fp32 (0.9 against 68 GFLOP/s on an AVX2 core); so the update is
    formed here, in bf16 only where that is native.

    Both halves share one learning rate: Muon's update is scaled to the size of AdamW's, so that
    the learning rate and decay tuned for AdamW can be kept.

    Args:
        params: groups as muon_groups() makes them; without the flag a group is AdamW's.
        betas, eps: AdamW's.   momentum: Muon's, of Nesterov's kind.
        fused: AdamW in one kernel; false on a device that has none.
    """

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
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
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
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter.grad)
            average = state["momentum_buffer"]
            average.lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(average, group["momentum"])
            if isinstance(update, DTensor):
                update = orthogonalize_gathered(update)
            else:
                update = orthogonalize(update, native_dtype(parameter.device))
            step_size = group["lr"] * ADAMW_RMS * math.sqrt(max(parameter.shape))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-step_size)


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrix with all singular values about 1 (0.7 to 1.2), computed in dtype.

    Five Newton-Schulz steps, products only. Equal to torch.optim.Muon's in bfloat16.
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix.to(dtype)
    if matrix.size(0) > matrix.size(1):
        wide = wide.T  # the smaller of the two products with itself
    wide = wide / wide.norm().clamp(min=NORM_FLOOR)  # singular values of at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def orthogonalize_gathered(matrix: DTensor) -> DTensor:
    """As orthogonalize(), of a sharded matrix; the result is sharded likewise.

    One gather, then every rank computes the same: products of sharded matrices would be 11 to 16
    collectives (CommDebugMode, four ranks). An offloaded matrix is gathered on its mesh's devices.
    """
    mesh, placements, home = matrix.device_mesh, matrix.placements, matrix.device
    whole_on_all = [Replicate()] * mesh.ndim
    dtype = native_dtype(torch.device(mesh.device_type))
    whole = matrix.to(mesh.device_type, dtype).redistribute(placements=whole_on_all).to_local()
    whole = DTensor.from_local(orthogonalize(whole, dtype), mesh, whole_on_all, run_check=False)
    return whole.redistribute(placements=placements).to(home)


def native_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device has instructions for it, else fp32."""
    if device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return torch.bfloat16
