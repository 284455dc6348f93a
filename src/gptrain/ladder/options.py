"""Types of the keys of the command `gptrain.ladder`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from gptrain.core.value_types import SEED_MAX, Count, Name, Section, between
from gptrain.plan.options import PlanRun


class Options(Section):
    """Options of the group `ladder`: a scaling-law sweep over smaller models.

    Attributes:
        sizes: Smaller models. A number is a factor for the target's depth and width, a text has
            overrides.
        target: Overrides for the target (the large model) only, separated by spaces.
        tokens_per_parameter: Lengths of the runs of each size, in tokens per parameter.
        seeds: Seeds of the runs. None for the key `seed` of the run.
        lr_rule: How `optimizer.lr` changes with d_model: not at all, or with its inverse square
            root.
        lr_width: Value of d_model for which `optimizer.lr` was chosen. None for that of the target.
        count: Parameters that the law counts as N. `auto` takes the choice that predicts the
            largest of the smaller models best.
        budget: FLOPs for which the best model size is printed, or None.
    """

    sizes: list[Annotated[float, Field(gt=0, le=100)] | Name] = Field(min_length=2)
    target: str
    tokens_per_parameter: list[Annotated[float, Field(ge=0.01)]] = Field(min_length=1)
    seeds: list[Annotated[int, between(0, SEED_MAX)]] | None
    lr_rule: Literal["constant", "sqrt_width"]
    lr_width: Count | None
    count: Literal["auto", "all", "matrices", "blocks"]
    budget: PositiveFloat | None


class LadderRun(PlanRun):
    """Keys of the command `gptrain.ladder`: those of `gptrain.plan`, and the group `ladder`.

    Attributes:
        ladder: Options of the sweep.
    """

    ladder: Options
