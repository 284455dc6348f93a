"""A start from weights alone: step 0, a fresh optimizer, new data."""

from __future__ import annotations

import shlex

import pytest
import torch

from gptrain.assemble.load import load_weights
from tests.command_line import compose_command

STILL = ("trainer.max_steps=1", "optimizer.lr=1e-12", "optimizer.weight_decay=0", "logger=none")


def assert_equal(state, expected) -> None:
    """Check that two states are equal up to one step with the learning rate of STILL."""
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


def test_a_run_and_the_file_in_its_checkpoint_are_starts(train, saved_twice):
    checkpoint = saved_twice.folder / "checkpoints" / "step-00000004"
    for source, mode in ((saved_twice.folder, "max"), (checkpoint / "state.ckpt", "min")):
        words = (f"init_from='{source}'", f"checkpoint.mode={mode}", "seed=7")
        begun = train(*STILL, *words, name=f"begun {mode}")
        assert begun.code == 0, begun.err
        assert_equal(begun.state(1)["weights"], saved_twice.state(4)["weights"])
        moments = begun.state(1)["optimizer"]["state"]
        assert {int(entry["step"]) for entry in moments.values()} == {1}
        assert begun.out.startswith("start ")
        resume = compose_command(shlex.split(begun.status["resume"])[2:])
        assert (resume.ckpt_path, resume.init_from) == ("last", str(source))


def test_files_of_compiled_nets_of_nanogpt_and_of_several_nets(tmp_path):
    torch.manual_seed(0)
    net, file = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)), tmp_path / "x.pt"
    names = net.state_dict()

    def load(content) -> list[torch.Tensor]:
        torch.save(content, file)
        other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        load_weights(other, file)
        return [*other.state_dict().values()]

    compiled = {f"_orig_mod.0._orig_mod.{n[2:]}" if n[0] == "0" else f"_orig_mod.{n}": t
                for n, t in names.items()}  # fmt: skip
    average = {f"average.{name}": tensor + 1 for name, tensor in names.items()}
    others = average | {f"model.{name}": tensor for name, tensor in names.items()}
    mine = average | {f"net.{name}": tensor for name, tensor in names.items()}
    for content in (compiled, {"model": compiled, "iter_num": 5}, {"state_dict": mine}):
        assert all(map(torch.equal, load(content), names.values()))
    with pytest.raises(ValueError, match=r"holds several nets: average\., model\."):
        load({"state_dict": others})


def test_a_file_of_two_nets_has_a_tied_tensor_under_one_name(tmp_path):
    tied, file = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), tmp_path / "x"
    tied[1].weight = tied[0].weight
    for prefix in ("net", "student"):
        named = {f"{prefix}.{name}": tensor.data for name, tensor in tied.named_parameters()}
        torch.save(named | {f"t.{name[len(prefix) + 1 :]}": -t for name, t in named.items()}, file)
        if prefix == "net":
            before = tied[0].weight.detach().clone()
            load_weights(tied, file)
            assert torch.equal(tied[0].weight, before)
    with pytest.raises(ValueError, match=r"holds several nets: student\., t\."):
        load_weights(tied, file)


def test_a_net_that_ties_two_tensors_refuses_two_that_differ(tmp_path):
    layers, file = [torch.nn.Linear(2, 2) for _ in range(2)], tmp_path / "x.pt"
    tied = torch.nn.Sequential(layers[0], layers[0])
    torch.save(tied.state_dict(), file)
    assert load_weights(tied, file) == []
    torch.save(torch.nn.Sequential(*layers).state_dict(), file)
    with pytest.raises(ValueError, match=r"1\.weight is 0\.weight only in the net; 1\.bias is"):
        load_weights(tied, file)


class OwnPositions(torch.nn.Module):
    """Positions as many write them: a parameter with a batch dimension, and a mask as a buffer."""

    def __init__(self, max_seq_len: int, width: int = 8):
        super().__init__()
        self.vocab_size, self.max_seq_len = 11, max_seq_len
        self.tokens = torch.nn.Embedding(self.vocab_size, width)
        self.positions = torch.nn.Parameter(torch.randn(1, max_seq_len, width))
        self.register_buffer("mask", torch.ones(1, max_seq_len, max_seq_len).tril())


def test_a_user_nets_positions_are_known_from_its_max_seq_len(tmp_path):
    short, file = OwnPositions(6), tmp_path / "short.ckpt"
    torch.save(short.state_dict(), file)
    net = OwnPositions(9)
    own, mask = net.positions.detach().clone(), net.mask.clone()
    (note,) = load_weights(net, file, resizes=True)
    assert note.startswith("positions (1, 6, 8)")
    assert torch.equal(net.positions, torch.cat([short.positions, own[:, 6:]], 1))
    assert torch.equal(net.tokens.weight, short.tokens.weight) and torch.equal(net.mask, mask)
    cut = OwnPositions(4)
    load_weights(cut, file, strict=False, resizes=True)
    assert torch.equal(cut.positions, short.positions[:, :4])
    others = {
        "positions": (OwnPositions(11), OwnPositions(8, width=7), OwnPositions(6, width=9)),
        "tokens.weight": (OwnPositions(9, width=9),),  # as wide as it has positions
    }
    shapes = {"positions": r"\(1, 6, 8\)", "tokens.weight": r"\(11, 8\)"}
    for name, nets in others.items():  # tokens or positions; other nets
        for other in nets:
            with pytest.raises(ValueError, match=rf"{name} {shapes[name]} in the checkpoint"):
                load_weights(other, file, resizes=True)
    net.register_buffer("mask", torch.ones(1, 9, 4))  # 6 positions became 9 in one dimension only
    with pytest.raises(ValueError, match=r"mask \(1, 6, 6\) in the checkpoint, \(1, 9, 4\)"):
        load_weights(net, file, resizes=True)
