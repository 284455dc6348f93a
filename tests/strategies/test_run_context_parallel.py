"""strategy=context_parallel through train.py."""

import pytest
import runs as helpers

NAME = "context_parallel"


class TestStrategy(helpers.StrategyTests):
    name, data_ranks = NAME, [0, 0]


@pytest.mark.slow
class TestResumeAndPrecision(helpers.PrecisionTests):
    name, data_ranks = NAME, [0, 0]
