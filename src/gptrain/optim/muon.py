"""Muon for the hidden matrices and AdamW for the rest, as one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon over the groups flagged use_muon, torch.optim.AdamW over the others.

    torch's Muon takes matrices only, and a training loop, a schedule and a checkpoint want one
    optimizer. Both halves share one learning rate: Muon's update is scaled to the size of AdamW's,
    so that a rate and a decay tuned for AdamW can be kept (arXiv:2502.16982, section 2.2).

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
        nothing = [{"params": []}]  # the halves are shown the groups at each step
        self._halves = {
            True: torch.optim.Muon(
                nothing, lr, weight_decay, momentum, adjust_lr_fn="match_rms_adamw"
            ),
            False: torch.optim.AdamW(nothing, lr, betas, eps, weight_decay, fused=fused),
        }
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "use_muon": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer's; a group keeps the options of its own half only."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name, value in self._halves[group["use_muon"]].defaults.items():
            group.setdefault(name, value)
        if group["use_muon"]:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ValueError(
                        f"Muon: a parameter of shape {tuple(parameter.shape)} in a group with "
                        f"use_muon=True; it takes matrices only, leave others to AdamW"
                    )

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step of both halves; the loss of the closure, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for use_muon, half in self._halves.items():
            # Anew at each step: load_state_dict() replaces the groups and the state.
            half.state = self.state
            half.param_groups = [g for g in self.param_groups if g["use_muon"] == use_muon]
            half.step()
        return loss
