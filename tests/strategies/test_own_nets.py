"""A user net is compared with its unpartitioned form before the first step."""

import unittest

import pytest
import torch
import torch.distributed as dist

from gptrain.core.strategies import default_options, parallel_dims
from gptrain.lit.strategies import build_strategy
from gptrain.parallel.placement import build_on_meta_device
from gptrain.parallel.requirements import IncompatibleModelError
from tests.strategies import own_nets
from tests.strategies.ranks import on_ranks

CPU = torch.device("cpu")
SAMPLE = torch.randint(61, (40,), generator=torch.Generator().manual_seed(0))


def build(name, net_class, sample=SAMPLE, **modes):
    """Build the strategy and the net of one rank as a run does."""
    options = default_options(name)
    dims = parallel_dims(options, dist.get_world_size() if dist.is_initialized() else 1)
    torch.manual_seed(0)
    return build_strategy(net_class, options, dims, CPU, sample=sample, **modes)


def check_refused(name, cases):
    """Check that each net is refused with a line that contains the expected text."""
    for net_class, piece in cases.items():
        with pytest.raises(IncompatibleModelError) as error:
            build(name, net_class)
        assert piece in str(error.value), (net_class.__name__, str(error.value))
        assert error.value.key == "strategy.name"
        assert "\n" not in str(error.value) and "gptrain.models" in str(error.value)


LOGITS = "the output differs; "


@pytest.mark.slow
@on_ranks(2)
def test_tensor_parallelism_accepts_nets_that_keep_the_contract_and_refuses_the_others():
    nets = (own_nets.OwnNet, own_nets.OnlyChain, own_nets.HalfLogits, own_nets.BiasedHead)
    for net_class in nets:
        sample = SAMPLE.roll(dist.get_rank())  # data of its own
        net, strategy = build("tensor_parallel", net_class, sample)
        assert {*strategy.parallel.partial_parameters} < {*net.parameters()}
    check_refused(
        "tensor_parallel",
        {
            own_nets.CountsHeads: LOGITS,
            own_nets.Windows: LOGITS,
            own_nets.Fused: LOGITS,
            own_nets.UnplannedScale: "the gradient of blocks.",
            own_nets.UnplannedEmbedding: "Error: ",
            own_nets.UnknownRole: "KeyError: 'diagonal'",
            own_nets.ScalesInLayer: LOGITS,
        },
    )


@on_ranks(2)
def test_a_pipeline_accepts_nets_that_are_a_chain_of_their_parts_and_refuses_the_others():
    for net_class in (own_nets.OwnNet, own_nets.OnlyChain, own_nets.CountsHeads, own_nets.Fused):
        build("pipeline", net_class)
    refused = (own_nets.HalfLogits, own_nets.SoftCapped, own_nets.ResidualOfEmbedding)
    check_refused("pipeline", dict.fromkeys((*refused, own_nets.PairInTraining), LOGITS))


def test_one_device_computes_the_loss_from_forward_if_hidden_and_head_differ():
    with unittest.TestCase().assertNoLogs("gptrain", "WARNING"):
        for net_class in (own_nets.OwnNet, own_nets.SoftCapped):
            build("single", net_class)
    for net_class in (
        own_nets.HalfLogits, own_nets.OnlyFloat32, own_nets.ScaledByBatch,
        own_nets.CapsInTraining, own_nets.DropsInHead,
        own_nets.DetachedEmbedding, own_nets.NotFiniteBackward,
    ):  # fmt: skip
        with unittest.TestCase().assertLogs("gptrain", "WARNING"):
            net, strategy = build("single", net_class)
        assert not strategy.parallel.uses_hidden(net)


def test_a_net_that_cannot_be_built_without_values_has_the_weights_of_its_seed():
    for net_class in (own_nets.ReadsValues, own_nets.DrawsOnCPU):
        net, strategy = build("single", net_class, None)
        counts = [sum(p.numel() for p in part.parameters()) for part in (net, strategy.full_net)]
        assert counts[0] == counts[1]  # a tied weight counts once
        torch.manual_seed(0)
        expected = net_class()
        assert net.factor == expected.factor
        assert torch.equal(net.blocks[1].up.weight, expected.blocks[1].up.weight)
    values = build_on_meta_device(lambda: torch.ones(2).numpy())  # a TypeError on the meta device
    assert values.tolist() == [1.0, 1.0]
