"""Tensor parallelism on two ranks equals one process, also with a sharded vocabulary."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kinds import (
    CPU,
    GRADIENT_RTOL,
    NOISE,
    OneProcess,
    Parallel,
    check_equals_one_process,
    check_logits_of_documents,
    close,
    make_batch,
    make_net,
)
from ranks import on_ranks
from sent import Sent
from torch.distributed.tensor import Shard, distribute_tensor

from gptrain.core.strategies import ParallelDims, default_options, parallel_dims
from gptrain.lit.strategies import build_strategy
from gptrain.loss import logits_in_chunks, next_token_loss
from gptrain.parallel.mesh import build_mesh
from gptrain.parallel.placement import full_tensor
from gptrain.parallel.tensor import partial_parameters, vocab_parallel_loss


@on_ranks(2)
def test_activation_checkpointing_changes_no_value():
    for mode in ("full", "selective"):
        kind = Parallel("tensor_parallel", recomputes=mode)
        check_equals_one_process(kind, packs=mode == "selective")
        check_logits_of_documents(kind)


@on_ranks(2)
def test_forward_and_head_return_full_logits_with_the_gradients_of_plain_cross_entropy():
    kind, truth = Parallel("tensor_parallel"), OneProcess()
    tokens, targets = make_batch(0, 0)
    expected, logits = truth.net(tokens), kind.net(tokens)
    close(logits, expected, GRADIENT_RTOL)
    for all_logits in (expected, logits):  # every rank computes the loss of these logits
        F.cross_entropy(all_logits.flatten(0, 1), targets.flatten()).backward()
    kind.parallel.finish_gradients()
    for name, gradient in kind.gradients().items():
        if NOISE not in name:
            close(gradient, truth.gradients()[name], GRADIENT_RTOL)
    with Sent() as in_fp32:
        hidden = kind.net.hidden(tokens)
    with Sent() as in_bf16, torch.autocast("cpu", torch.bfloat16):
        kind.net.hidden(tokens)
    assert in_bf16.n_bytes["allgather"] == in_fp32.n_bytes["allgather"] / 2 > 0
    chunks = list(logits_in_chunks(hidden, kind.net.head, targets, chunk_tokens=4))
    counts = targets != -100
    close(torch.cat([some for some, _ in chunks]), expected[counts], GRADIENT_RTOL)
    assert torch.equal(torch.cat([kept for _, kept in chunks]), targets[counts])


def test_the_first_pattern_that_matches_a_layer_gives_its_role():
    net = make_net()
    expected = partial_parameters(net)
    net.tensor_plan = {**net.tensor_plan, "*": "colwise", "*norm*": "sequence"}
    assert [id(p) for p in partial_parameters(net)] == [id(p) for p in expected]


def make_half_frozen_net():
    net = make_net()
    for part in (net.blocks[0], net.position_embedding, net.blocks[1].attention):
        part.requires_grad_(False)
    return net


@on_ranks(2)
def test_frozen_parameters_of_every_role_stay_frozen_when_they_are_split():
    options = default_options("tensor_parallel")
    dims = parallel_dims(options, dist.get_world_size())
    net, strategy = build_strategy(make_half_frozen_net, options, dims, CPU)
    frozen, expected = (
        {name for name, parameter in half_frozen.named_parameters() if not parameter.requires_grad}
        for half_frozen in (net, make_half_frozen_net())
    )
    assert frozen == expected and len(expected) > 20
    options = default_options("pipeline")  # a rank holds a part of the parameters only
    dims = parallel_dims(options, dist.get_world_size())
    stages = build_strategy(make_half_frozen_net, options, dims, CPU)[1]
    parameters = [*make_half_frozen_net().parameters()]
    n_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    for info in (strategy.info, stages.info):
        assert info.n_parameters == sum(parameter.numel() for parameter in parameters)
        assert info.n_trained == n_trained


def _head(v=61, d=8):
    """Return hidden states, the full head, this rank's shard, and targets with ignored entries."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, d, dtype=torch.float64, generator=generator, requires_grad=True)
    whole = torch.randn(v, d, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(v, (3, 7), generator=generator)
    targets[:, ::3] = -100
    mesh = build_mesh("cpu", ParallelDims(tensor=2))["tensor"]
    part = distribute_tensor(whole.detach(), mesh, [Shard(0)])
    return hidden, whole, part.requires_grad_(), targets


@on_ranks(2)
def test_the_loss_over_a_sharded_vocabulary_is_exact_with_all_loss_options():
    options = itertools.product((0.0, 0.1, 1.0), (0.0, 1e-2), ("mean", "sum"))
    for label_smoothing, z_loss, reduction in options:
        hidden, whole, part, targets = _head()
        named = {"label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction}
        expected = next_token_loss(hidden @ whole.T, targets, **named)
        expected_grads = torch.autograd.grad(expected, (hidden, whole))
        loss = vocab_parallel_loss(hidden, part, targets, chunk_tokens=4, **named)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        of_hidden, of_part = torch.autograd.grad(loss, (hidden, part))
        dist.all_reduce(of_hidden)  # each rank's columns give a partial sum
        torch.testing.assert_close(of_hidden, expected_grads[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(full_tensor(of_part), expected_grads[1], rtol=1e-10, atol=1e-12)
