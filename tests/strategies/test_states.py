"""Any strategy reads the states of any other, also of extra parameters outside the net."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from kinds import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    NOISE,
    OneProcess,
    Parallel,
    broadcast,
    close,
    make_net,
)
from ranks import on_ranks
from torch import nn

from gptrain.parallel import state as states
from gptrain.parallel.placement import copy_from_full, full_tensor


class CountsSteps(torch.optim.Optimizer):
    """A user optimizer whose state has a Python integer, a scalar tensor and a moment."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"n": 0, "t": torch.zeros(()), "sum": torch.zeros_like(parameter)}
                state["n"] += 1
                state["t"] += 0.5
                state["sum"] += parameter.grad
                parameter -= group["lr"] * state["sum"]


def every_kind(seed):
    yield OneProcess(seed=seed)
    yield Parallel("fsdp", seed=seed)
    yield Parallel("tensor_parallel", seed=seed)
    yield Parallel("pipeline", seed=seed)


def with_extra_parameter(kind):
    """Add a parameter outside the net to the optimizer, with a tensor as learning rate."""
    scale = nn.Parameter(torch.tensor([2.0, 3.0]))
    kind.extra_parameters = {"module.scale": scale}
    kind.optimizer = CountsSteps([{"params": list(kind.net.parameters())}])
    kind.optimizer.add_param_group({"params": [scale], "lr": torch.tensor(0.5)})
    return kind


def trained(kind):
    """Take one optimizer step and return the trained object."""
    with_extra_parameter(kind).step(0)
    kind.extra_parameters["module.scale"].grad = torch.tensor([0.25, 0.5])
    kind.update()
    return kind


def check_full_state(state, expected):
    """Check that a full state has one process's names, and its values up to rounding."""
    assert sorted(state) == sorted(expected)
    for name in (name for name in expected if NOISE not in name):
        if isinstance(expected[name], dict):
            close(state[name].pop("sum"), expected[name]["sum"], GRADIENT_RTOL)
            assert state[name] == {"n": 1, "t": 0.5} and type(state[name]["n"]) is int
        else:
            close(state[name], expected[name], GRADIENT_RTOL)


def check_resumes(kind, expected, truth_step):
    """Check that training with the loaded optimizer state equals the reference's next step."""
    for name, parameter in kind.parameters().items():
        entry, expected_entry = kind.optimizer.state[parameter], expected["state"][name]
        assert (entry["n"], entry["t"]) == (1, 0.5) and type(entry["n"]) is int
        if NOISE not in name:
            close(full_tensor(entry["sum"]), expected_entry["sum"], GRADIENT_RTOL)
    assert [float(group["lr"]) for group in kind.optimizer.param_groups] == [0.1, 0.5]
    loss, norm = kind.step(1)
    assert abs(loss / truth_step[0] - 1) < LOSS_RTOL
    assert abs(norm / truth_step[1] - 1) < LOSS_RTOL


def check_states(kinds):
    """Check that each strategy writes full and sharded states and reads those of others."""
    truth = trained(OneProcess())
    net_state, expected = broadcast(copy.deepcopy(truth.states()))
    assert expected["param_groups"][1] == {"lr": 0.5, "params": ["module.scale"]}
    truth_step = truth.step(1)
    folder, groups = Path(broadcast(tempfile.mkdtemp())), []
    for number, kind in enumerate(map(trained, kinds(seed=0))):
        held = kind.parameters(), kind.optimizer
        shards = states.sharded_state(kind.net, *held, kind.stages)
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder / str(number)))
        saved = dcp.FileSystemReader(folder / str(number)).read_metadata().state_dict_metadata
        tensors = {name for name in saved if name.startswith("net.")}
        assert tensors == {f"net.{name}" for name in net_state if name != "head.weight"}  # tied
        groups.append(broadcast(states.named_groups(*held, kind.stages)))
        full_state, of_optimizer = kind.states()
        # Only rank 0 gets a copy of the states.
        assert bool(full_state) == bool(of_optimizer["state"]) == (dist.get_rank() == 0)
        if full_state:
            check_full_state(full_state, net_state)
            check_full_state(of_optimizer["state"], expected["state"])
    for number, other in enumerate(map(with_extra_parameter, kinds(seed=1)), -1):
        other.load(net_state, expected)
        check_resumes(other, expected, truth_step)
        again = with_extra_parameter(other)
        reader = dcp.FileSystemReader(
            folder / str(number % len(groups))
        )  # written by another strategy
        states.load_net_state(again.net, reader, stages=again.stages)
        again.load_optimizer(reader, groups[number])
        again.optimizer.zero_grad()
        check_resumes(again, expected, truth_step)


@on_ranks(2)
def test_any_strategy_reads_the_states_of_the_others():
    check_states(every_kind)


@on_ranks(2)
def test_any_strategy_loads_matching_weights_and_names_the_others_on_both_sides():
    """The state has a tied weight once, a weight of another shape, and an unknown weight."""
    given = OneProcess(seed=3).net.state_dict()
    of_tied = given.pop("head.weight")
    given.pop("blocks.1.mlp.up_proj.bias")
    given |= {"blocks.2.norm_1.weight": torch.ones(5), "blocks.0.adapter": torch.ones(2)}
    folder = Path(broadcast(tempfile.mkdtemp()))
    dcp.save({"net": given}, storage_writer=dcp.FileSystemWriter(folder))
    for source in (given, dcp.FileSystemReader(folder)):
        for kind in every_kind(seed=0):
            with pytest.raises(
                ValueError,
                match=r"norm_1.weight \(5,\) in the checkpoint, \(32,\) in the net; "
                r".*bias only in the net; .* only in the checkpoint",
            ):
                states.load_net_state(kind.net, source, stages=kind.stages)
            left_out = states.load_net_state(kind.net, source, strict=False, stages=kind.stages)
            assert left_out.missing == ["blocks.1.mlp.up_proj.bias"]
            assert left_out.unexpected == ["blocks.0.adapter"]
            assert left_out.mismatched == {"blocks.2.norm_1.weight": ((5,), (32,))}
            loaded = states.full_net_state(kind.net, kind.stages)
            if dist.get_rank() == 0:
                expected = OneProcess(seed=0).net.state_dict() | {"head.weight": of_tied}
                left = {*left_out.unexpected, *left_out.mismatched}
                expected |= {name: tensor for name, tensor in given.items() if name not in left}
                assert loaded.keys() == expected.keys()
                assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


@on_ranks(2)
def test_any_strategy_loads_fewer_learned_positions_and_keeps_its_other_positions():
    """A file and shards are accepted; a strict load refuses them."""
    given = OneProcess(seed=3).net.state_dict()
    table = "position_embedding.weight"
    given[table] = given[table][:9].clone()
    folder = Path(broadcast(tempfile.mkdtemp()))
    tied_once = {name: tensor for name, tensor in given.items() if name != "head.weight"}
    dcp.save({"net": tied_once}, storage_writer=dcp.FileSystemWriter(folder))
    expected = OneProcess(seed=0).net.state_dict()[table]
    expected = torch.cat([given[table], expected[9:]])
    for source in (given, dcp.FileSystemReader(folder)):
        for kind in every_kind(seed=0):
            with pytest.raises(
                ValueError, match=r"\(9, 32\) in the checkpoint, \(16, 32\) in the net$"
            ):
                states.load_net_state(kind.net, source, stages=kind.stages)
            left = states.load_net_state(kind.net, source, resizes=True, stages=kind.stages)
            assert left.positions == {table: (9, 16)} and not left.describe()
            if source is given:  # a rank knows only the optional names of its own stages
                lacking = {"blocks.0.norm_1.weight", "norm.weight"}
                fewer = {name: tensor for name, tensor in given.items() if name not in lacking}
                words = {"resizes": True, "stages": kind.stages}
                words["optional"] = lacking & kind.parameters().keys()
                assert not states.load_net_state(kind.net, fewer, **words).missing
            loaded = states.full_net_state(kind.net, kind.stages)
            if dist.get_rank() == 0:
                assert torch.equal(loaded[table], expected)
                assert torch.equal(loaded["norm.weight"], given["norm.weight"])


def test_an_unknown_parameter_and_an_invalid_option_are_named():
    net = make_net()
    stray = nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.SGD([{"params": list(net.parameters())}, {"params": [stray]}], 0.1)
    parameters = states.named_parameters(net)
    with pytest.raises(ValueError, match=r"group 1 of SGD has a parameter of shape \(3, 4\)"):
        states.full_optimizer_state(parameters, optimizer)
    parameters["module.stray"] = stray
    state = states.full_optimizer_state(parameters, optimizer)
    optimizer.param_groups[0]["momentum"] = abs
    with pytest.raises(ValueError, match="option momentum of the optimizer is a builtin"):
        states.named_groups(parameters, optimizer)
    optimizer.state[stray]["rows"] = [1]
    with pytest.raises(ValueError, match=r"optimizer state module\.stray\.rows is a list; allowed"):
        states.sharded_state(net, parameters, optimizer)
    lr = torch.tensor(0.5)
    adam = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.8, 0.7))
    (group,) = states.named_groups(parameters, adam)
    assert group["betas"] == (0.8, 0.7) and type(group["lr"]) is float
    with pytest.raises(ValueError, match=r"of shape \(2,\); allowed: .*, \(3, 4\)$"):
        copy_from_full(stray, torch.ones(2))
    one_group = torch.optim.SGD([*net.parameters(), stray], 0.1)
    states.load_optimizer_state(
        parameters, one_group, state["state"], state["param_groups"]
    )  # options are equal
    one_group.add_param_group({"params": []})  # of a stage without such parameters
    states.load_optimizer_state(
        parameters, one_group, state["state"], states.named_groups(parameters, one_group)
    )
    one_group.param_groups.pop()
    state["param_groups"][1]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"module.stray: not in a group with token_embedding"):
        states.load_optimizer_state(parameters, one_group, state["state"], state["param_groups"])
    state["param_groups"].pop()
    with pytest.raises(ValueError, match=r"module\.stray: not in a group"):
        states.load_optimizer_state(parameters, one_group, state["state"], state["param_groups"])


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_shard_that_cannot_be_read_raises_its_own_error(tmp_path):
    """The exception of torch, which has one error per rank, would end a run as a defect."""
    net = nn.Linear(2, 3)
    dcp.save({"net": net.state_dict()}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        states.load_net_state(net, dcp.FileSystemReader(tmp_path))
