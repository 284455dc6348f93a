"""The learning rate that every optimizer step took, against a schedule's closed form."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gptrain.assemble.module import build_schedule
from gptrain.core.lengths import plan_lengths
from gptrain.core.schema import RunConfig
from gptrain.optim import warmup_cosine
from tests.command_line import compose_run
from tests.run import same


@pytest.mark.parametrize("warmup, steps", [(0.1, 30), (None, 30), (0.02, 6), (300, 300)])
def test_a_warm_up_as_a_fraction_is_one_of_the_schedules_length(warmup, steps):
    """The run is the first leg, of 50 steps, of a longer one of 300. A tenth is the default.

    A warm-up may be as long as the schedule.
    """
    n_steps = min(steps + 1, 300)
    made = factors(n_steps, warmup_steps=warmup, total_steps=300, start_factor=0)
    assert made == pytest.approx([step / steps for step in range(n_steps)])


@pytest.mark.parametrize("decay, steps", [(0, 0), (0.1, 5), (None, 10), (50, 49)])
def test_a_decay_has_the_length_that_was_typed_and_else_a_fifth_of_the_run(decay, steps):
    """The last of the 50 steps has the smallest factor, also without any decay before it."""
    made = factors(50, decay_steps=decay)
    assert made == pytest.approx([min(1.0, (49 - step) / max(1, steps)) for step in range(50)])


@cache
def config() -> RunConfig:
    return compose_run("trainer.max_steps=50", "optimizer.lr=1", "scheduler=warmup_stable_decay")


def factors(n_steps: int, **schedule: object) -> list[float]:
    """Return the factors of the first steps of a run of 50 steps of 1,024 tokens."""
    keys = {"min_factor": 0.0, "decay_steps": 0, "warmup_steps": 0} | schedule
    cfg = config().changed({f"scheduler.{key}": value for key, value in keys.items()})
    lengths = plan_lengths(cfg, n_samples=6400, sample_tokens=16, data_parallel_size=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_schedule(cfg, lengths, optimizer)["scheduler"]
    made = []
    for _ in range(n_steps):
        made.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return made


def test_a_warm_up_that_follows_from_the_length_stays_that_of_the_first_start(train):
    """A tenth of the first start is one step, and of the second start it would be two."""
    words = ("scheduler=warmup_cosine", "logger=none", "trainer.log_every_n_steps=1")
    words = (*words, "optimizer.lr=1e-3", "scheduler.start_factor=0.5", "scheduler.min_factor=0")
    train("trainer.max_steps=10", "trainer.val_check_interval=1", *words).cut_back(1)
    again = train("trainer.max_steps=20", "ckpt_path=last", *words)
    assert again.code == 0, again.err
    run = {"warmup_steps": 1, "total_steps": 20, "start_factor": 0.5, "min_factor": 0.0}
    expected = [1e-3 * warmup_cosine(step, **run) for step in range(1, 20)]
    assert again.column("lr")[1:] == pytest.approx(expected)


def test_phases_in_tokens_are_those_in_steps():
    """A number of tokens is rounded down to whole steps."""
    tokens = {"warmup_tokens": 2 * 512 + 1, "decay_tokens": 3 * 512, "total_tokens": 7.5 * 512}
    none = {"warmup_steps": None, "decay_steps": None}
    steps = {"warmup_steps": 2, "decay_steps": 3, "total_steps": 7}
    assert factors(7, **none, **tokens) == factors(7, **steps)


def test_a_cool_down_of_a_run_is_bit_for_bit_the_run_that_was_to_decay_there(train):
    words = ("optimizer=muon", "model.dropout=0.1", "data.num_samples=14", "logger=none",
             "trainer.log_every_n_steps=1", "scheduler.warmup_steps=2")  # fmt: skip
    decay = ("scheduler=warmup_stable_decay", "scheduler.decay_steps=3", "trainer.max_steps=8")
    whole = train(*decay, *words, name="whole")
    stable = train("scheduler=warmup_constant", "trainer.max_steps=5", *words, name="stable")
    assert stable.code == 0, stable.err
    here = (f"from_run={stable.folder}", f"ckpt_path={stable.folder}", *decay)
    run = train(*here, "allow_changes=[scheduler]", "logger=none", tiny=False)
    assert run.code == 0 and "from step 5 to 8" in run.out, run.err
    assert run.column("lr") == whole.column("lr")[5:]
    for part in ("weights", "optimizer"):
        assert not same(run.state(8)[part], whole.state(8)[part])
    assert stable.checkpoints[-1].name == "step-00000005"  # the first run is as it was
