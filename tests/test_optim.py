"""Groups, schedules and Muon do to the weights what their names say."""

import inspect
import math
from functools import partial

import pytest
import torch
from torch import nn

from gptrain.models import SimpleGPT
from gptrain.optim import (
    Muon,
    constant,
    decay_groups,
    muon_groups,
    scaled_lr,
    warmup_constant,
    warmup_cosine,
    warmup_linear,
    warmup_stable_decay,
)
from gptrain.optim import muon as muon_file


@pytest.fixture(autouse=True)
def one_thread_and_a_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def small_gpt() -> SimpleGPT:
    return SimpleGPT(31, d_model=16, n_heads=2, n_layers=2, max_seq_len=8, dropout=0.0)


def names(net: nn.Module, group: dict) -> set[str]:
    return {name for name, p in net.named_parameters() if any(p is q for q in group["params"])}


# Groups


def test_matrices_decay_and_vectors_do_not():
    net = small_gpt()
    groups = decay_groups(net.parameters())
    matrices, vectors = torch.optim.SGD(groups, lr=1.0, weight_decay=0.1).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    expected = {n for n, _ in net.named_parameters() if n.endswith("weight") and "norm" not in n}
    assert names(net, matrices) == expected
    assert names(net, vectors) == {n for n, _ in net.named_parameters()} - expected


def test_a_tied_parameter_is_in_one_group_once_and_a_frozen_one_in_none():
    net = small_gpt()
    net.position_embedding.requires_grad_(False)
    listed = [p for group in decay_groups(net.parameters()) for p in group["params"]]
    assert sum(p is net.head.weight for p in listed) == 1
    assert not any(p is net.position_embedding.weight for p in listed)
    assert len(listed) == len(list(net.parameters())) - 1
    assert decay_groups(net.requires_grad_(False).parameters()) == []  # no group is empty


def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest_and_what_lies_beside():
    net, scale = small_gpt(), nn.Parameter(torch.ones(3))
    table, frozen = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2), requires_grad=False)
    learned = [*net.parameters(), scale, table, frozen]
    hidden, *rest = Muon(muon_groups(net, learned), weight_decay=0.1).param_groups
    assert hidden["use_muon"] and not any(group["use_muon"] for group in rest)
    matrices = {n for n, p in net.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    assert names(net, hidden) == names(net, muon_groups(net)[0]) == matrices
    decay = {p: group["weight_decay"] for group in rest for p in group["params"]}
    assert (decay[table], decay[scale], frozen in decay) == (0.1, 0.0, False)
    assert len(hidden["params"]) + len(decay) == len(list(net.parameters())) + 2
    with pytest.raises(ValueError, match="Linear has no attribute `blocks`"):
        muon_groups(nn.Linear(2, 2))


def test_embeddings_head_and_vectors_have_learning_rates_of_their_own():
    """tests/truth trains with them. Here: a tied table, a rate of zero, and no rates."""
    net = small_gpt()
    tied = muon_groups(net, embedding_lr=3.0, head_lr=2.0)
    rates = {p: group["lr"] for group in tied for p in group["params"] if "lr" in group}
    assert rates[net.head.weight] == 3.0
    # The last stage of a pipeline holds the tied table in its head, under the name of the table.
    names_of = {net.head.weight: "token_embedding.weight"}
    (group,) = Muon.parameter_groups(net, names_of, names_of, embedding_lr=3.0, head_lr=2.0)
    assert group["lr"] == 3.0
    at_rest = Muon(muon_groups(net, vector_lr=0.0), lr=1.0).param_groups
    assert {group["lr"] for group in at_rest} == {0.0, 1.0}
    assert {group["lr"] for group in Muon(muon_groups(net), lr=1.0).param_groups} == {1.0}


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_learning_rate_follows_the_batch_by_the_rule(rule, factor):
    assert scaled_lr(3e-4, rule, 256, 64) == pytest.approx(3e-4 * factor)
    assert scaled_lr(3e-4, rule, 64, 64) == 3e-4


# Schedules

STABLE_DECAY = partial(warmup_stable_decay, decay_steps=20)
RUN = {"warmup_steps": 10, "total_steps": 101, "start_factor": 0.1, "min_factor": 0.2}
# The first, warm-up's last, the decay's first quarter and middle, the last, past it.
STEPS = (0, 1, 9, 10, 32.5, 55, 100, 101, 10_000)
COSINE = 0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (warmup_cosine, (0.1, 0.19, 0.91, 1.0, COSINE, 0.6, 0.2, 0.2, 0.2)),
        (warmup_linear, (0.1, 0.19, 0.91, 1.0, 0.8, 0.6, 0.2, 0.2, 0.2)),
        (STABLE_DECAY, (0.1, 0.19, 0.91, 1.0, 1.0, 1.0, 0.2, 0.2, 0.2)),
        (warmup_constant, (0.1, 0.19, 0.91, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
        (constant, (1.0,) * 9),
    ],
)
def test_factor_at_the_steps_that_matter(schedule, expected):
    run = {key: RUN[key] for key in RUN if key in inspect.signature(schedule).parameters}
    assert [schedule(step, **run) for step in STEPS] == pytest.approx(list(expected))


@pytest.mark.parametrize("schedule", [warmup_cosine, warmup_linear, STABLE_DECAY])
def test_runs_too_short_for_their_shape_have_one(schedule):
    no_warmup = {**RUN, "warmup_steps": 0}
    assert schedule(0, **no_warmup) == 1.0
    assert schedule(100, **no_warmup) == pytest.approx(0.2)
    only_warmup = {**RUN, "warmup_steps": 101}
    assert schedule(0, **only_warmup) == 0.1
    assert schedule(100, **only_warmup) == pytest.approx(0.1 + 0.9 * 100 / 101)
    assert schedule(101, **only_warmup) == pytest.approx(0.2)
    one_step = {**RUN, "warmup_steps": 0, "total_steps": 1}
    assert schedule(0, **one_step) == pytest.approx(0.2)
    # A warm-up and a decay that overlap meet at the peak.
    overlapping = {**RUN, "warmup_steps": 60, "decay_steps": 80}
    factors = [warmup_stable_decay(step, **overlapping) for step in (59, 60, 80, 100)]
    assert factors == pytest.approx([0.1 + 0.9 * 59 / 60, 1.0, 0.6, 0.2])
    # A decay of no step, as a fifth of a run of two steps, is at the last one.
    two = {**no_warmup, "total_steps": 2, "decay_steps": 0}
    assert [warmup_stable_decay(step, **two) for step in (0, 1)] == [1.0, pytest.approx(0.2)]


# Muon


def train(net: SimpleGPT, optimizers: list, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(31, (4, 8), generator=torch.Generator().manual_seed(step))
        net(tokens).logsumexp(-1).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()


def test_muon_is_torchs_two_optimizers_in_one(monkeypatch):
    monkeypatch.setattr(
        muon_file, "native_dtype", lambda device: torch.bfloat16
    )  # like torch.optim.Muon
    net, reference = small_gpt(), small_gpt()
    reference.load_state_dict(net.state_dict())
    hidden, *rest = muon_groups(reference)
    for group in (hidden, *rest):
        group.pop("use_muon")
    theirs_in_two = [
        torch.optim.Muon([hidden], lr=3e-3, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, 3e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, fused=True),
    ]
    train(reference, theirs_in_two, range(3))
    muon = Muon(muon_groups(net), lr=3e-3, betas=(0.8, 0.9), eps=1e-3, momentum=0.9)
    train(net, [muon], range(3))
    for (name, weight), other in zip(net.named_parameters(), reference.parameters(), strict=True):
        # Of steps of 3e-3. A CPU with instructions for bf16 rounds products in batches otherwise.
        most = 1e-6 if torch.cpu._is_avx512_bf16_supported() else 0.0
        torch.testing.assert_close(weight, other, rtol=0, atol=most, msg=name)


def test_both_halves_of_muon_follow_a_schedule_also_after_a_resume_and_keep_their_states():
    net = small_gpt()
    muon = Muon(muon_groups(net), lr=3e-3)
    train(net, [muon], range(1))
    assert set(muon.state[net.blocks[0].mlp.up_proj.weight]) == {"momentum_buffer"}
    assert set(muon.state[net.head.weight]) == {"step", "exp_avg", "exp_avg_sq"}
    muon.load_state_dict(muon.state_dict())
    torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 0.0)
    before = [p.clone() for p in net.parameters()]
    train(net, [muon], range(1))
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def test_muon_runs_where_one_half_has_nothing_to_do():
    weight = nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.eye(3)
    unused = nn.Parameter(torch.ones(3, 3))  # has no gradient
    for use_muon in (True, False):
        Muon([{"params": [unused, weight], "use_muon": use_muon}]).step()
    assert torch.equal(unused, torch.ones(3, 3)) and not torch.equal(weight, unused)


@pytest.mark.parametrize(("major", "dtype"), [(7, torch.float32), (8, torch.bfloat16)])
def test_muon_computes_in_bf16_where_a_gpu_has_instructions_for_it(monkeypatch, major, dtype):
    """V100 and T4 (7.x) have none."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 5))
    assert muon_file.native_dtype(torch.device("cuda", 0)) == dtype
