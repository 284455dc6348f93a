"""strategy=context_parallel through train.py."""

import pytest
import runs as helpers

NAME = "context_parallel"


class TestStrategy(helpers.StrategyTests):
    name, data_ranks = NAME, [0, 0]


@pytest.mark.slow
class TestResumeAndPrecision(helpers.PrecisionTests):
    name, data_ranks = NAME, [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ddp", "pipeline"])
def test_checkpoints_of_other_strategies_can_be_resumed(source, runs):
    helpers.check_reads_checkpoints_of(runs, NAME, source)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "tensor_parallel"])
def test_other_strategies_resume_its_checkpoints(name, runs):
    helpers.check_reads_checkpoints_of(runs, name, NAME)
