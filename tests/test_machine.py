"""Which GPU a local rank gets, and what Lightning makes of it; GPUs are counted, never touched."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from gptrain.lit.environment import Ranks
from gptrain.lit.strategies.ranks import Replicated, Single
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import OmegaConf

from gptrain.assemble.trainer import hand_devices
from gptrain.launch.devices import Machine, find_machine, listed_numbers


@pytest.fixture(autouse=True)
def _rank_0_again(monkeypatch):
    """A Trainer tells Lightning's loggers, once for the process, which rank they are of."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)


@pytest.fixture
def visible(monkeypatch):
    """How many GPUs this process seems to see."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return pretend


def machine_of(devices):
    return find_machine(
        OmegaConf.create({"trainer": {"accelerator": "cuda", "devices": devices, "num_nodes": 1}})
    )


def numbers(machine):
    return [machine.device(i).index for i in range(machine.n_local)]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([1, 3], [1, 3]),
        ("3,1", [3, 1]),
        ("3,", [3]),
        ([3], [3]),
        (2, [0, 1]),
        ("2", [0, 1]),
        ("auto", [0, 1, 2, 3]),
        (-1, [0, 1, 2, 3]),
    ],
)
def test_ranks_take_the_gpus_that_are_listed_or_the_first(devices, expected, visible):
    visible(4)
    assert numbers(machine_of(devices)) == expected


def test_a_rank_that_sees_one_gpu_takes_it(visible, monkeypatch):
    visible(1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for devices in (2, "auto", [1, 3]):
        machine = machine_of(devices)
        assert machine.n_local == 2
        assert numbers(machine) == [0, 0]


def test_nothing_is_listed_by_a_number_or_a_word():
    for devices in (2, "2", -1, "-1", "auto"):
        assert listed_numbers(devices) == ()


@pytest.mark.parametrize(
    ("machine", "count"),
    [
        (Machine("cuda", 2, 1, (1, 3)), 4),
        (Machine("cuda", 2, 1), 4),  # torchrun starts fewer ranks than there are GPUs
        (Machine("cuda", 2, 1), 1),  # srun --gpus-per-task=1
    ],
)
def test_lightning_puts_each_rank_where_we_do(machine, count, visible):
    visible(count)
    for rank in range(2):
        trainer = make_trainer(Replicated(), machine, rank)
        assert trainer.strategy.root_device == machine.device(rank)
        assert (trainer.world_size, trainer.num_devices) == (2, 2)


def test_lightning_takes_a_single_gpu_of_any_number(visible):
    visible(4)
    machine = Machine("cuda", 1, 1, (3,))
    trainer = make_trainer(Single(machine.device(0)), machine, rank=0)
    assert trainer.strategy.root_device == torch.device("cuda", 3)


def make_trainer(strategy, machine, rank):
    return pl.Trainer(
        accelerator=machine.accelerator,
        devices=hand_devices(strategy, machine),
        strategy=strategy,
        plugins=[Ranks(rank, rank, machine.world_size, machine.n_local)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
