"""Any strategy writes states that any other reads, also what lies beside the net."""

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
from gptrain.parallel.slices import whole_of
from gptrain.parallel.state import WHOLE


class CountsSteps(torch.optim.Optimizer):
    """As users write them: a Python integer in the state, and a moment."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["n"], state["sum"] = 0, torch.zeros_like(parameter)
                state["n"] += 1
                state["sum"] += parameter.grad
                parameter -= group["lr"] * state["sum"]


def every_kind(seed):
    yield OneProcess(seed=seed)
    yield Parallel("fsdp", seed=seed)
    yield Parallel("tensor_parallel", seed=seed)
    yield Parallel("pipeline", seed=seed, schedule="interleaved_1f1b")  # two stages a rank


def every_mix(seed):
    yield Parallel("fsdp_tensor_parallel", seed=seed)
    yield Parallel("ddp_pipeline", seed=seed)


def trained(kind):
    kind.step(0)
    kind.update()
    return kind


def check_state_of(kind, truth):
    """The whole state has one process's names, and values to rounding."""
    for mine, expected in zip(kind.states(), truth.states(), strict=True):
        held = mine.get("state", mine)
        assert bool(held) == (dist.get_rank() == 0)  # no other rank keeps a copy of the whole
        if dist.get_rank() == 0:
            mine, expected = (state.get("state", state) for state in (mine, expected))
            assert sorted(mine) == sorted(expected)
            for name in (name for name in expected if NOISE not in name):
                if isinstance(expected[name], dict):
                    for key in ("step", "exp_avg", "exp_avg_sq"):
                        close(mine[name][key], expected[name][key], GRADIENT_RTOL)
                else:
                    close(mine[name], expected[name], GRADIENT_RTOL)


def check_goes_on_like(loaded, truth_step):
    loss, norm = loaded.step(1)
    assert abs(loss / truth_step[0] - 1) < LOSS_RTOL
    assert abs(norm / truth_step[1] - 1) < LOSS_RTOL
    groups = loaded.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def check_whole_states(kinds):
    truth = trained(OneProcess())
    for kind in kinds(seed=0):
        check_state_of(trained(kind), truth)
    saved = copy.deepcopy(truth.states())
    expected = truth.step(1)
    for kind in kinds(seed=1):
        kind.load(*broadcast(saved))
        check_goes_on_like(kind, expected)


@on_ranks(2)
def test_any_strategy_saves_the_whole_state_and_loads_it():
    check_whole_states(every_kind)


@on_ranks(4)
def test_any_mix_saves_the_whole_state_and_loads_it():
    check_whole_states(every_mix)


def _with_one_beside(kind):
    """A parameter on the module, trained by the same optimizer, which counts in integers."""
    scale = nn.Parameter(torch.tensor([2.0, 3.0]))
    kind.beside = {"module.scale": scale}
    kind.optimizer = CountsSteps([{"params": list(kind.net.parameters())}])
    kind.optimizer.add_param_group({"params": [scale], "lr": torch.tensor(0.5)})
    return kind


def _step(kind):
    kind.step(0)
    kind.beside["module.scale"].grad = torch.tensor([0.25, 0.5])
    kind.optimizer.step()


def _check_beside(kind, expected):
    """The state of expected, in this kind's own optimizer."""
    for name, parameter in kind.parameters().items():
        mine, theirs = kind.optimizer.state[parameter], expected["state"][name]
        assert mine["n"] == theirs["n"] == 1 and type(mine["n"]) is int
        if NOISE not in name and kind.stages == WHOLE:
            close(whole_of(mine["sum"]), theirs["sum"], GRADIENT_RTOL)
    assert torch.equal(
        kind.optimizer.state[kind.beside["module.scale"]]["sum"], torch.tensor([0.25, 0.5])
    )
    assert [float(group["lr"]) for group in kind.optimizer.param_groups] == [0.1, 0.5]


@on_ranks(2)
def test_parameters_beside_the_net_and_numbers_in_a_state_are_kept_by_all_strategies():
    truth = _with_one_beside(OneProcess())
    _step(truth)
    expected = broadcast(copy.deepcopy(truth.states()[1]))
    assert expected["param_groups"][1] == {"lr": 0.5, "params": ["module.scale"]}
    folder, groups = Path(broadcast(tempfile.mkdtemp())), []
    for number, kind in enumerate(map(_with_one_beside, every_kind(seed=0))):
        _step(kind)
        held = kind.parameters(), kind.optimizer
        shards = states.sharded_state(kind.net, *held, kind.stages)
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder / str(number)))
        groups.append(broadcast(states.named_groups(*held, kind.stages)))
        mine, one = broadcast(kind.states()[1]), _with_one_beside(OneProcess(seed=1))
        assert mine["state"].keys() == expected["state"].keys()
        one.load_optimizer(mine["state"], mine["param_groups"])
        _check_beside(one, expected)
    for other in map(_with_one_beside, every_kind(seed=1)):
        other.load_optimizer(expected["state"], expected["param_groups"])
        _check_beside(other, expected)
    for number, other in enumerate(map(_with_one_beside, every_kind(seed=1)), -1):
        reader = dcp.FileSystemReader(folder / str(number % len(groups)))  # of another kind
        states.load_net_state(other.net, reader, stages=other.stages)
        other.load_optimizer(reader, groups[number])
        _check_beside(other, expected)


def _changed(state):
    """A state that lacks a block's bias, has one weight in another shape, and one nobody knows."""
    state = dict(state)
    state.pop("blocks.1.mlp.up_proj.bias")
    state["blocks.2.norm_1.weight"] = torch.ones(5)
    state["blocks.0.adapter"] = torch.ones(2)
    return state


LEFT_OUT = (
    ["blocks.1.mlp.up_proj.bias"],
    ["blocks.0.adapter"],
    {"blocks.2.norm_1.weight": ((5,), (32,))},
)


@on_ranks(2)
def test_any_strategy_loads_what_fits_and_names_what_does_not_on_either_side():
    given = broadcast(_changed(OneProcess(seed=3).net.state_dict()))
    folder = Path(broadcast(tempfile.mkdtemp()))
    sharded = {name: tensor for name, tensor in given.items() if name != "head.weight"}
    dcp.save({"net": sharded}, storage_writer=dcp.FileSystemWriter(folder))
    for source in (given, dcp.FileSystemReader(folder)):
        for kind in every_kind(seed=0):
            with pytest.raises(
                ValueError,
                match=r"norm_1.weight \(5,\) there, \(32,\) here; .*bias here only; .* there only",
            ):
                states.load_net_state(kind.net, source, stages=kind.stages)
            left_out = states.load_net_state(kind.net, source, strict=False, stages=kind.stages)
            assert tuple(left_out) == LEFT_OUT
            mine = states.whole_net_state(kind.net, kind.stages)
            if dist.get_rank() == 0:
                fresh = OneProcess(seed=0).net.state_dict()
                for name, tensor in mine.items():
                    fits = name in given and given[name].shape == tensor.shape
                    assert torch.equal(tensor, given[name] if fits else fresh[name]), name


def test_a_parameter_that_is_nobodys_and_an_option_that_is_no_value_are_named():
    net = make_net()
    stray = nn.Parameter(torch.ones(3, 4))
    optimizer = torch.optim.SGD([{"params": list(net.parameters())}, {"params": [stray]}], 0.1)
    parameters = states.named_parameters(net)
    with pytest.raises(ValueError, match=r"group 1 of SGD has a parameter of shape \(3, 4\)"):
        states.whole_optimizer_state(parameters, optimizer)
    parameters["module.stray"] = stray
    state = states.whole_optimizer_state(parameters, optimizer)
    optimizer.param_groups[0]["momentum"] = abs
    with pytest.raises(ValueError, match="option momentum of the optimizer is a builtin"):
        states.named_groups(parameters, optimizer)
    one_group = torch.optim.SGD([*net.parameters(), stray], 0.1)
    states.load_optimizer_state(
        parameters, one_group, state["state"], state["param_groups"]
    )  # options are equal
    state["param_groups"][1]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"module.stray: not in a group with token_embedding"):
        states.load_optimizer_state(parameters, one_group, state["state"], state["param_groups"])
    state["param_groups"].pop()
    with pytest.raises(ValueError, match=r"module\.stray: not in a group"):
        states.load_optimizer_state(parameters, one_group, state["state"], state["param_groups"])


def test_a_tied_weight_may_be_given_once():
    net, other = make_net(), make_net()
    state = {name: tensor for name, tensor in other.state_dict().items() if name != "head.weight"}
    assert not any(states.load_net_state(net, state))
    assert torch.equal(net.head.weight, other.token_embedding.weight)
