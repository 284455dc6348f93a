"""Which GPU and which part of each axis a rank gets; GPUs are counted, never touched."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from gptrain.assemble.trainer import place_options
from gptrain.core.shell import override
from gptrain.core.strategies import ParallelDims, default_options, parallel_dims, stage_blocks
from gptrain.lit.rank_environment import RankEnvironment
from gptrain.lit.strategies.base import ManyRanks
from gptrain.parallel.base import Parallel
from gptrain.runtime.devices import RunDevices, find_devices
from gptrain.runtime.process import Process
from tests.command_line import compose_run


@pytest.fixture
def visible(monkeypatch):
    """How many GPUs this process seems to see. A Trainer sets the rank of the process."""
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)

    return pretend


def machine_of(devices, n_nodes=1):
    words = ("trainer.accelerator=cuda", f"trainer.num_nodes={n_nodes}", "run_dir=a")
    return find_devices(compose_run(override("trainer.devices", devices), *words))


def numbers(machine):
    return [machine.device(i).index for i in range(machine.n_local)]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([1, 3], [1, 3]), ("3,1", [3, 1]), ("3,", [3]), ([3], [3]), (2, [0, 1]), ("2", [0, 1]),
     ("auto", [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), ("-1", [0, 1, 2, 3])],
)  # fmt: skip
def test_ranks_take_the_gpus_that_are_listed_or_the_first(devices, expected, visible, monkeypatch):
    visible(4)
    assert numbers(machine_of(devices)) == expected
    n_local = len(expected)
    for name, n in {"RANK": 0, "WORLD_SIZE": 3 * n_local, "LOCAL_WORLD_SIZE": n_local}.items():
        monkeypatch.setenv(name, str(n))
    assert machine_of(devices, n_nodes=3).world_size == 3 * len(expected)


def test_a_rank_that_sees_one_gpu_takes_it(visible, monkeypatch):
    visible(1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for devices in (2, "auto", [1, 3]):
        machine = machine_of(devices)
        assert machine.n_local == 2
        assert numbers(machine) == [0, 0]


@pytest.mark.parametrize(
    ("machine", "count"),
    [
        (RunDevices("cuda", 2, 1, (1, 3)), 4),
        (RunDevices("cuda", 2, 1), 4),  # torchrun starts fewer ranks than there are GPUs
        (RunDevices("cuda", 2, 1), 1),  # srun --gpus-per-task=1
    ],
)
def test_lightning_puts_each_rank_where_we_do(machine, count, visible):
    visible(count)
    for rank in range(2):
        strategy = ManyRanks(Parallel())
        place = RankEnvironment(Process(rank, rank, machine.world_size))
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = pl.Trainer(
            **place_options(machine, strategy) | {"plugins": [place]}, **dict.fromkeys(off, False),
        )  # fmt: skip
        assert trainer.strategy.root_device == machine.device(rank)
        assert (trainer.world_size, trainer.num_devices, trainer.node_rank) == (2, 2, 0)
    places = [RankEnvironment(Process(rank, rank % 2, 6, n_nodes=3)) for rank in range(6)]
    assert [place.node_rank() for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.local_rank() for place in places] == [0, 1] * 3


@pytest.mark.parametrize(
    ("name", "sizes", "n_ranks", "n_nodes", "expected"),
    [
        ("auto", {}, 1, 1, {}),
        ("auto", {}, 2, 1, {"data": 2}),
        ("fsdp", {}, 8, 1, {"data": 8}),
        ("fsdp", {"replicas": 4}, 8, 1, {"data": 8, "replicas": 4}),  # HSDP: 4 copies on 2 ranks
        ("tensor_parallel", {}, 4, 1, {"tensor": 4}),
        ("pipeline", {"pipeline_parallel_size": 4}, 4, 1, {"pipeline": 4}),
        ("fsdp_tensor_parallel", {}, 8, 1, {"data": 4, "tensor": 2}),
        ("fsdp_tensor_parallel", {"tensor_parallel_size": 4}, 8, 1, {"data": 2, "tensor": 4}),
        ("ddp_pipeline", {"pipeline_parallel_size": 3}, 6, 1, {"data": 2, "pipeline": 3}),
        ("context_parallel", {}, 8, 1, {"context": 8}),
        ("context_parallel", {}, 16, 2, {"data": 2, "context": 8}),  # the ranks of a node
        ("context_parallel", {"context_parallel_size": 3}, 6, 1, {"data": 2, "context": 3}),
    ],
)
def test_data_parallelism_uses_the_ranks_that_the_other_axes_leave(
    name, sizes, n_ranks, n_nodes, expected
):
    options = default_options(name).model_copy(update=sizes)
    dims = parallel_dims(options, n_ranks, n_nodes)
    assert dims == ParallelDims(**expected) and dims.world_size == n_ranks


def test_an_axis_that_does_not_divide_the_ranks_is_an_equation():
    options = default_options("context_parallel").model_copy(update={"context_parallel_size": 3})
    with pytest.raises(ValueError, match=r"data 2 x context 3 .*= 6, but there are 8 ranks"):
        parallel_dims(options, 8)


def test_the_first_stages_of_a_pipeline_hold_the_blocks_that_are_left_over():
    stages = [stage_blocks(stage, 4, 6) for stage in range(4)]
    assert [len(blocks) for blocks in stages] == [2, 1, 2, 1]
    assert [block for blocks in stages for block in blocks] == list(range(6))


def test_neighbouring_ranks_read_the_same_samples_in_every_stage_of_a_pipeline():
    dims = ParallelDims(data=2, tensor=2, pipeline=2)
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
