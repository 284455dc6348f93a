"""Optimizers that do not call their closure, or call it more than once."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor


def call_closure_first(
    optimizer: torch.optim.Optimizer, accumulate: int = 1
) -> torch.optim.Optimizer:
    """The same optimizer, whose step computes the gradients even if its class never asks for them.

    Lightning hands forward and backward to `step(closure)`. torch's optimizers call it; many a
    user's takes no closure, or drops it, and would step on no gradients. Here it is called before.
    An optimizer that does call it is given that loss at the same weights; at others, or once more,
    the batch is evaluated anew, its gradients in place of the earlier ones (SAM, Foret et al.
    2021, arXiv:2010.01412).

    Args:
        accumulate: micro-batches of a step. A closure is the last one alone, so the step of an
            optimizer that has it evaluated anew raises ValueError where there are more.
    """
    own = type(optimizer)
    takes_closure = "closure" in inspect.signature(own.step).parameters

    def state() -> list[tuple[int, bool]]:
        groups = optimizer.param_groups
        return [(p._version, p.grad is None) for group in groups for p in group["params"]]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if closure is None:
            return own.step(self)
        with torch.enable_grad():
            losses = [closure()]
        before = state()

        def again() -> Tensor:
            if losses and state() == before:
                return losses.pop()
            if accumulate > 1:
                raise ValueError(
                    f"{own.__name__} evaluates the loss more than once in a step, and of its "
                    f"{accumulate} micro-batches only the last is there; "
                    "try trainer.accumulate_grad_batches=1"
                )
            losses.clear()
            self.zero_grad()
            with torch.enable_grad():
                return closure()

        return own.step(self, **{"closure": again} if takes_closure else {})

    optimizer.__class__ = type(own.__name__, (own,), {"step": step, "__module__": own.__module__})
    return optimizer
