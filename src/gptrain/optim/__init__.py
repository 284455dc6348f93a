"""How weights move: parameter groups, learning-rate schedules and their scaling, Muon.

An optimizer is a class `(groups, lr=…, **options)`. Any of torch's or a user's own gets its groups
from `decay_groups`; `Muon` alone gets them from `muon_groups`.
A schedule is a function of the optimizer step that returns the factor on the learning rate.
"""

from gptrain.optim.groups import decay_groups, muon_groups, scaled_lr
from gptrain.optim.muon import Muon
from gptrain.optim.schedules import (
    constant,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)

__all__ = [
    "Muon", "constant", "decay_groups", "muon_groups", "scaled_lr",
    "warmup_constant", "warmup_cosine", "warmup_linear", "warmup_stable_decay",
]  # fmt: skip
