"""The learning rate that every optimizer step took, against a schedule's closed form."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from gptrain.assemble.module import build_schedule
from gptrain.core.lengths import plan_lengths
from tests.command_line import compose_run
from tests.conftest import logged_rows

PEAK, WARMUP, STEPS, START, FLOOR = 1e-3, 4, 13, 0.1, 0.2


def learning_rates(folder) -> list[float]:
    return [row["lr"] for row in logged_rows(folder) if row["lr"] is not None]


@pytest.mark.parametrize("warmup, steps", [("0.1", 30), ("null", 30), ("0.02", 6), ("300", 300)])
def test_a_warm_up_as_a_fraction_is_one_of_the_schedules_length(warmup, steps):
    """The run is the first leg, of 50 steps, of a longer one of 300. A tenth is the default.

    A warm-up may be as long as the schedule.
    """
    schedule = (f"scheduler.warmup_steps={warmup}", "scheduler.total_steps=300")
    n_steps = min(steps + 1, 300)
    made = factors(n_steps, *schedule, "scheduler.start_factor=0")
    assert made == pytest.approx([step / steps for step in range(n_steps)])


@pytest.mark.parametrize("decay, steps", [("0", 0), ("0.1", 5), ("null", 10), ("50", 49)])
def test_a_decay_has_the_length_that_was_typed_and_else_a_fifth_of_the_run(decay, steps):
    """The last of the 50 steps has the smallest factor, also without any decay before it."""
    words = ("scheduler=warmup_stable_decay", f"scheduler.decay_steps={decay}")
    made = factors(50, *words, "scheduler.warmup_steps=0", "scheduler.min_factor=0")
    assert made == pytest.approx([min(1.0, (49 - step) / max(1, steps)) for step in range(50)])


def factors(n_steps: int, *words: str) -> list[float]:
    """Return the factors of the first steps of a run of 50 steps."""
    cfg = compose_run(*words, "trainer.max_steps=50", "optimizer.lr=1")
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
    """The run equals, bit for bit, a longer run that has this warm-up as an option."""
    options = ("scheduler=warmup_cosine", "logger=none", "trainer.log_every_n_steps=1")
    run = train("trainer.max_steps=10", "trainer.val_check_interval=1", *options)
    assert run.code == 0, run.err  # a tenth: 1 step
    run.cut_back(1)
    again = train("trainer.max_steps=20", "ckpt_path=last", *options)
    assert again.code == 0, again.err
    whole = train("trainer.max_steps=20", "scheduler.warmup_steps=1", *options, name="whole")
    states = [finished.state(20)["state_dict"] for finished in (again, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def tensors_of(state) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


STEP_TOKENS = 4 * 16  # sequences x positions of TINY


def test_phases_in_tokens_are_those_in_steps(train):
    schedule = ("scheduler=warmup_stable_decay", "logger=none", "trainer.log_every_n_steps=1")
    steps = train("scheduler.warmup_steps=2", "scheduler.decay_steps=3", "scheduler.total_steps=7",
                  "trainer.max_steps=7", *schedule, name="steps")  # fmt: skip
    # A number of tokens is rounded down to whole steps, like max_tokens.
    lengths = {"warmup": 2 * STEP_TOKENS + 1, "decay": 3 * STEP_TOKENS, "total": 7.5 * STEP_TOKENS}
    tokens = (f"scheduler.{phase}_tokens={count}" for phase, count in lengths.items())
    run = train(*tokens, f"max_tokens={7 * STEP_TOKENS}", "trainer.max_steps=-1", *schedule)
    assert run.code == 0, run.err
    rates = learning_rates(run.folder)
    assert rates == learning_rates(steps.folder) and len(set(rates)) == 6


def test_a_cool_down_of_a_run_is_bit_for_bit_the_run_that_was_to_decay_there(train):
    """Also where the cool-down is itself interrupted; the run it came from stays as it was."""
    options = ("optimizer=muon", "model.dropout=0.1", "data.num_samples=14", "logger=none",
               "trainer.log_every_n_steps=1", "scheduler.warmup_steps=2")  # fmt: skip
    whole = train("scheduler=warmup_stable_decay", "scheduler.decay_steps=3", "trainer.max_steps=8",
                  *options, name="whole")  # fmt: skip
    stable = train("scheduler=warmup_constant", "trainer.max_steps=5", *options, name="stable")
    assert stable.code == 0, stable.err
    here = (f"from_run={stable.folder}", "scheduler=warmup_stable_decay", "trainer.max_steps=8",
            "scheduler.decay_steps=3", "allow_changes=[scheduler]", "logger=none")  # fmt: skip
    start = f"ckpt_path={stable.folder}"
    run = train(*here, start, "trainer.val_check_interval=1", tiny=False)
    assert run.code == 0, run.err
    run.cut_back(6)
    again = train(*here, "ckpt_path=last", tiny=False)
    assert again.code == 0, again.err
    assert "from step 6 to 8" in again.out
    assert learning_rates(run.folder) == learning_rates(whole.folder)[5:]
    states = [finished.state(8) for finished in (again, whole)]
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(*(tensors_of(state[part]) for state in states), rtol=0, atol=0)
    assert not list(stable.folder.glob("checkpoints/step-*[6-8]"))
