"""How weights move: parameter groups, learning-rate schedules and their scaling, Muon.

An optimizer is a class `(groups, lr=…, **options)`. It gets its groups from `decay_groups`, or from
its own class method `parameter_groups`, as `Muon`. If its states are not two values per parameter,
it says so in a static method `facts` (see `gptrain.costs.optimizers`).
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
