"""The learning rate that every optimizer step took, against each schedule's closed form."""

from __future__ import annotations

import csv
import math

import pytest

PEAK, WARMUP, STEPS, START, FLOOR = 1e-3, 4, 13, 0.1, 0.2


def after_warmup(name: str, step: int) -> float:
    """The factor past the warm-up, from its definition."""
    done = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return {
        "warmup_constant": 1.0,
        "warmup_linear": 1 - (1 - FLOOR) * done,
        "warmup_cosine": FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2,
    }[name]


def expected(name: str, step: int) -> float:
    if name == "constant":
        return PEAK
    if step < WARMUP:
        return PEAK * (START + (1 - START) * step / WARMUP)
    return PEAK * after_warmup(name, step)


def learning_rates(folder) -> list[float]:
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row["lr"]) for row in csv.DictReader(file) if row["lr"]]


@pytest.mark.parametrize("name", ["constant", "warmup_constant", "warmup_linear", "warmup_cosine"])
def test_a_schedule_counts_optimizer_steps_whatever_the_accumulation(train, name):
    run = train(
        f"scheduler={name}", f"optimizer.lr={PEAK}", f"scheduler.warmup_steps={WARMUP}",
        f"scheduler.start_factor={START}", f"scheduler.min_factor={FLOOR}", "logger=csv",
        f"trainer.max_steps={STEPS}", "data.global_batch_size=8", "trainer.log_every_n_steps=1",
    )  # fmt: skip
    assert run.code == 0, run.err
    # steps 0, 1, warmup-1, warmup, middle, last and all between
    assert learning_rates(run.folder) == pytest.approx(
        [expected(name, step) for step in range(STEPS)]
    )


@pytest.mark.parametrize("rule, factor", [("linear", 2.0), ("sqrt", math.sqrt(2))])
def test_the_learning_rate_grows_with_the_global_batch(train, rule, factor):
    run = train(
        "scheduler=constant", f"optimizer.lr={PEAK}", f"optimizer.lr_scaling={rule}", "logger=csv",
        "optimizer.reference_batch_size=4", "data.global_batch_size=8",
    )  # fmt: skip
    assert run.metrics["lr"] == pytest.approx(PEAK * factor)
    assert f"lr {PEAK * factor:g}" in run.out


@pytest.mark.parametrize("length, bends", [("null", True), ("8", False)])
def test_going_on_to_another_end_says_where_it_bends_the_schedule(train, length, bends):
    options = ("scheduler=warmup_linear", f"scheduler.total_steps={length}", "logger=none")
    run = train("trainer.max_steps=4", *options)
    assert run.code == 0, run.err
    again = train("trainer.max_steps=6", "ckpt_path=last", *options)
    assert again.code == 0, again.err
    said = "resumed with another schedule: after step 4 the learning rate was to be 3e-05 and is"
    assert (said in again.out + again.err) == bends
