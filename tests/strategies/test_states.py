"""Any strategy reads the states of any other, also of extra parameters outside the net."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kinds import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    NOISE,
    OneProcess,
    Parallel,
    broadcast,
    close,
)
from ranks import on_ranks
from safetensors.torch import save_file
from torch import nn

from gptrain.checkpoints.tensors import SavedTensors, load_file
from gptrain.parallel import state as states
from gptrain.parallel.placement import copy_from_full, full_tensor
from tests.run import read_tensors


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


def check_saved(saved, expected):
    """Check that a checkpoint has one process's names, and its values up to rounding."""
    assert sorted(saved) == sorted(expected)
    for name in (name for name in expected if NOISE not in name):
        close(saved[name], expected[name], GRADIENT_RTOL)


def check_resumes(kind, expected, truth_step):
    """Check that training with the loaded optimizer state equals the reference's next step."""
    for name, parameter in kind.parameters().items():
        entry = kind.optimizer.state[parameter]
        assert (entry["n"], entry["t"]) == (1, 0.5) and type(entry["n"]) is int
        if NOISE not in name:
            close(full_tensor(entry["sum"]), expected[f"{name}.sum"], GRADIENT_RTOL)
    assert [float(group["lr"]) for group in kind.optimizer.param_groups] == [0.1, 0.5]
    loss, norm = kind.step(1)
    assert abs(loss / truth_step[0] - 1) < LOSS_RTOL
    assert abs(norm / truth_step[1] - 1) < LOSS_RTOL


def check_states(kinds):
    """Check that each strategy writes one process's tensors, and reads those of the others."""
    truth = trained(OneProcess())
    folder = Path(broadcast(tempfile.mkdtemp()))
    saved = truth.save(folder / f"alone-{dist.get_rank()}")
    assert sorted(path.name for path in saved.glob("*.safetensors")) == [
        "model.safetensors", "optimizer.safetensors"
    ]  # fmt: skip
    expected = read_tensors(saved)
    assert "head.weight" not in expected  # it is tied
    truth_step = truth.step(1)
    folders = [saved]
    for number, kind in enumerate(map(trained, kinds(seed=0))):
        owner = "all" if kind.saves_together else dist.get_rank()
        folders.append(kind.save(folder / f"{number}-{owner}"))
        check_saved(read_tensors(folders[-1]), expected)
        assert load_file(folders[-1] / "state.ckpt")["groups"][-1] == {
            "lr": 0.5, "params": ["module.scale"]
        }  # fmt: skip
    for number, other in enumerate(map(with_extra_parameter, kinds(seed=1)), -1):
        for source in (saved, folders[number]):  # written by one process, and by another strategy
            again = with_extra_parameter(other)
            again.load(source)
            again.optimizer.zero_grad()
            check_resumes(again, expected, truth_step)


@on_ranks(2)
def test_any_strategy_reads_the_states_of_the_others():
    check_states(every_kind)


@on_ranks(2)
def test_any_strategy_loads_matching_weights_and_names_the_others_on_both_sides():
    """The state has a tied weight once, a weight of another shape, and an unknown weight."""
    given = OneProcess(seed=3).net.state_dict()
    given.pop("head.weight")  # is tied
    given.pop("blocks.1.mlp.up_proj.bias")
    given |= {"blocks.2.norm_1.weight": torch.ones(5), "blocks.0.adapter": torch.ones(2)}
    folder = Path(tempfile.mkdtemp())  # of this rank
    save_file(given, folder / "model.safetensors")
    for source in (given, SavedTensors(folder)):
        for kind in every_kind(seed=0):
            with pytest.raises(
                ValueError,
                match=r"norm_1.weight \(5,\) in the checkpoint, \(32,\) in the net; "
                r".*bias only in the net; .* only in the checkpoint",
            ):
                states.load_net_state(kind.net, source, stages=kind.stages)
            left_out = states.load_net_state(kind.net, source, strict=False, stages=kind.stages)
            left = ("blocks.2.norm_1.weight", "blocks.1.mlp.up_proj.bias", "blocks.0.adapter")
            assert [phrase.split()[0] for phrase in left_out.tensors] == list(left)
            expected = OneProcess(seed=0).net.state_dict()
            expected |= {name: tensor for name, tensor in given.items() if name not in left}
            for name, tensor in states.saved_tensors(kind.net, kind.stages).items():
                assert torch.equal(full_tensor(tensor), expected[name])


@on_ranks(2)
def test_any_strategy_loads_fewer_learned_positions_and_keeps_its_other_positions():
    """A file and shards are accepted; a strict load refuses them."""
    given = OneProcess(seed=3).net.state_dict()
    table = "position_embedding.weight"
    given[table] = given[table][:9].clone()
    folder = Path(tempfile.mkdtemp())  # of this rank
    tied_once = {name: tensor for name, tensor in given.items() if name != "head.weight"}
    save_file(tied_once, folder / "model.safetensors")
    expected = OneProcess(seed=0).net.state_dict()[table]
    expected = torch.cat([given[table], expected[9:]])
    for source in (given, SavedTensors(folder)):
        for kind in every_kind(seed=0):
            with pytest.raises(
                ValueError, match=r"\(9, 32\) in the checkpoint, \(16, 32\) in the net$"
            ):
                states.load_net_state(kind.net, source, stages=kind.stages)
            left = states.load_net_state(kind.net, source, resizes=True, stages=kind.stages)
            (line,) = left.positions
            assert table in line and " 9 " in line and " 16 " in line and not left.tensors
            loaded = states.saved_tensors(kind.net, kind.stages)
            for name, wanted in ((table, expected), ("norm.weight", given["norm.weight"])):
                if name in loaded:
                    assert torch.equal(full_tensor(loaded[name]), wanted)


def test_a_parameter_without_a_name_and_one_of_another_group_are_named(tmp_path):
    kind = OneProcess()
    stray = nn.Parameter(torch.ones(3, 4))
    kind.optimizer = torch.optim.SGD(
        [{"params": [*kind.net.parameters()]}, {"params": [stray]}], 0.1
    )
    with pytest.raises(ValueError, match=r"group 1 of SGD has a parameter of shape \(3, 4\)"):
        kind.save(tmp_path)
    kind.extra_parameters = {"module.stray": stray}
    folder = kind.save(tmp_path)
    kind.optimizer = torch.optim.SGD([*kind.net.parameters(), stray], 0.1)
    kind.load(folder)  # options are equal
    kind.optimizer.add_param_group({"params": []})  # of a stage without such parameters
    kind.load(folder)
    parameters, nothing = kind.parameters(), SavedTensors(tmp_path, "optimizer")
    groups = states.named_groups(parameters, kind.optimizer)
    groups[0]["params"].remove("module.stray")
    with pytest.raises(ValueError, match=r"module\.stray: not in a group with token_embedding"):
        states.load_optimizer_state(parameters, kind.optimizer, nothing, {}, groups)
    adam = torch.optim.AdamW(kind.net.parameters(), lr=torch.tensor(0.5), betas=(0.8, 0.7))
    (group,) = states.named_groups(parameters, adam)
    assert group["betas"] == (0.8, 0.7) and type(group["lr"]) is float
    with pytest.raises(ValueError, match=r"of shape \(2,\); allowed: .*, \(3, 4\)$"):
        copy_from_full(stray, torch.ones(2))
