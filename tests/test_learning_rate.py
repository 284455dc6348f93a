"""Learning rates against a schedule's closed form, and optimizers by their names."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gptrain.assemble.module import build_optimizer, build_schedule, peak_lr
from gptrain.core.errors import ConfigError
from gptrain.core.lengths import BatchPlan, plan_lengths
from gptrain.core.schema import OptimizerConfig, RunConfig
from gptrain.optim import warmup_cosine
from tests.command_line import compose_run
from tests.run import same


@pytest.mark.parametrize("warmup, steps", [(0.1, 30), (None, 30), (0.29, 87), (300, 300)])
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
    lengths = plan_lengths(cfg, BatchPlan(32, 1, 1), n_samples=6400, sample_tokens=16)
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


FOUR = BatchPlan(4, 1, 1)  # twice the reference


class Own(torch.optim.Optimizer):
    """An optimizer with groups of its own."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @classmethod
    def parameter_groups(cls, net, parameters, names, *, bias_lr: float | None = None):
        biases, others = [], []
        for parameter in parameters:
            (biases if names[parameter].endswith("bias") else others).append(parameter)
        return [{"params": others}, {"params": biases, "lr": bias_lr}]


def as_if_from_a_yaml(**group) -> RunConfig:
    """Return a config whose optimizer group is a yaml file with these keys."""
    defaults = {"lr": None, "weight_decay": None, "lr_scaling": "linear", "reference_batch_size": 2}
    optimizer = OptimizerConfig.model_validate(defaults | group)
    return compose_run("model=gpt_nano").changed({"optimizer": optimizer})


def test_an_optimizer_from_outside_makes_its_own_parameter_groups():
    run = as_if_from_a_yaml(_target_=f"{__name__}.Own", lr=0.5, bias_lr=0.25, weight_decay=0.0)
    net = torch.nn.Linear(3, 2)
    matrices, biases = build_optimizer(run, FOUR, net).param_groups
    assert (matrices["params"], matrices["lr"]) == ([net.weight], 1.0)
    assert (biases["params"], biases["lr"]) == ([net.bias], 0.5)


@pytest.mark.parametrize("name", ["NAdam", "SGD"])
def test_an_optimizer_of_torch_needs_only_its_name(name):
    """The learning rate is scaled to the batch, and only matrices get weight decay."""
    cfg = as_if_from_a_yaml(_target_=f"torch.optim.{name}", weight_decay=0.3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(cfg, FOUR, net)
    default = getattr(torch.optim, name)(net.parameters())
    assert type(optimizer) is type(default)
    assert optimizer.defaults["lr"] == 2 * default.defaults["lr"]  # 4 sequences / 2
    groups = [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert groups == [(0.3, 1), (0.0, 3)]


def test_a_decay_that_an_optimizer_does_not_know_is_an_error_and_not_silence():
    cfg = as_if_from_a_yaml(_target_="torch.optim.Rprop", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"optim.Rprop: .* argument 'weight_decay'"):
        build_optimizer(cfg, FOUR, torch.nn.Linear(2, 2))
    assert peak_lr(cfg.changed({"optimizer.weight_decay": None}), FOUR) == 0.02
