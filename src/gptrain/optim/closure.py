"""Optimizers that do not call their closure."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor


def call_closure_first(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, whose step computes the gradients even if its class never asks for them.

    Lightning hands forward and backward to `step(closure)`. torch's optimizers call it; many a
    user's takes no closure, or drops it, and would step on no gradients. Here it is called before;
    an optimizer that does call it is given that loss the first time, and a new one after.
    """
    own = type(optimizer)
    takes_closure = "closure" in inspect.signature(own.step).parameters

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        if closure is None:
            return own.step(self)
        with torch.enable_grad():
            losses = [closure()]
        again = {"closure": lambda: losses.pop() if losses else closure()}
        return own.step(self, **again if takes_closure else {})

    optimizer.__class__ = type(own.__name__, (own,), {"step": step, "__module__": own.__module__})
    return optimizer
