"""python -m gptrain.generate from the runs of all strategies."""

import pytest
import runs as helpers

from gptrain.config.cli import run_command
from gptrain.generate.__main__ import DEFAULTS, GenerateRun, generate


@pytest.mark.parametrize("name", ["fsdp", "pipeline"])
def test_a_checkpoint_of_any_strategy_generates_the_same_tokens_as_one_process(name, runs, capfd):
    """The sampled token ids are equal, for the run and for its checkpoint at step 4."""
    spoken = {}
    for strategy in ("single", name):
        run = helpers.plain(runs, strategy)
        for source in (run.folder, run.checkpoint(4)):
            words = (f"from_run={source}", "prompt='7 8'", "n_tokens=12", "temperature=0.1")
            capfd.readouterr()
            assert run_command(generate, list(words), GenerateRun, DEFAULTS) == 0
            spoken[strategy, source == run.folder] = capfd.readouterr().out
    assert spoken["single", True] == spoken[name, True]
    assert spoken["single", False] == spoken[name, False]
    assert len(set(spoken[name, True].split())) > 4
