"""Parameter groups, learning-rate schedules, learning-rate scaling and the Muon optimizer.

An optimizer is a class `(groups, lr=…, **options)`. `decay_groups` makes its groups, or, as for
Muon, its function `parameter_groups(net, parameters, names, **options)`. An optimizer whose state
is not two values per parameter states their number in the attribute `states_per_parameter`.

A schedule is a function from the optimizer step to the factor on the learning rate.
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
