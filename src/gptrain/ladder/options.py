"""Types of the keys of the command `gptrain.ladder`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from gptrain.core.value_types import SEED_MAX, Count, Name, Section, between
from gptrain.plan.options import PlanRun


class Options(Section):
    """Options of the group `ladder`. The help of `gptrain.ladder` describes each of them."""

    sizes: list[Annotated[float, Field(gt=0, le=100)] | Name] = Field(min_length=2)
    target: str
    tokens_per_parameter: list[Annotated[float, Field(ge=0.01)]] = Field(min_length=1)
    seeds: list[Annotated[int, between(0, SEED_MAX)]] | None
    lr_rule: Literal["constant", "sqrt_width"]
    lr_width: Count | None
    count: Literal["auto", "all", "matrices", "blocks"]
    budget: PositiveFloat | None


class LadderRun(PlanRun):
    """Keys of the command: those of `gptrain.plan`, and the group `ladder`."""

    ladder: Options
