"""Context parallelism on two and four ranks equals one process."""

import warnings
from functools import partial
from unittest.mock import patch

import kinds
import own_nets
import pytest
import torch
import torch.nn.functional as F
from kinds import (
    GRADIENT_RTOL,
    LOSS_RTOL,
    NOISE,
    OneProcess,
    Parallel,
    check_equals_one_process,
    close,
)
from ranks import on_ranks
from test_own_nets import LOGITS, build, check_refused
from torch import nn

from gptrain.loss import LossOptions
from gptrain.models import Llama
from gptrain.parallel import base


def make_llama(n_heads, n_kv_heads):
    """Build a Llama whose heads of k and v four ranks cannot divide."""
    return Llama(
        61, 8 * n_heads, n_heads, n_kv_heads, n_layers=2, d_ff=40, max_seq_len=16, qk_norm=True
    )


@pytest.mark.slow
@on_ranks(4)
def test_a_llama_on_four_ranks_equals_one_process_also_with_repeated_heads_of_k_and_v():
    # Two heads of k and v are fewer than the ranks, six are more, but four does not divide them.
    few, many = partial(make_llama, 4, 2), partial(make_llama, 12, 6)
    for llama, size, packs in ((few, 4, True), (few, 2, True), (many, 4, False)):
        with patch.object(kinds, "make_net", llama):
            kind = Parallel("context_parallel", context_parallel_size=size)
            check_equals_one_process(kind, packs)
            assert (kind.dims.data, kind.dims.context) == (4 // size, size)


@on_ranks(2)
def test_forward_returns_full_logits_with_the_gradients_of_plain_cross_entropy():
    """A loss of the user's own calls the net; every rank computes it from the same logits."""
    truth = OneProcess()
    tokens, targets = kinds.make_batch(0, 0)
    expected = truth.net(tokens)
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    kind = Parallel("context_parallel")
    logits = kind.net(tokens)
    close(logits, expected, GRADIENT_RTOL)
    with pytest.raises(ValueError, match="strategy=context_parallel has no cache"):
        kind.net(tokens, object())
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    kind.parallel.finish_gradients()
    for name, gradient in kind.gradients().items():
        if NOISE not in name:
            close(gradient, truth.gradients()[name], GRADIENT_RTOL)
    for net in (truth.net, kind.net):  # the loss is then computed from full logits
        net.head.bias = nn.Parameter(torch.arange(61) / 10)
    batch = base.Batch(tokens, targets, kinds.make_documents())
    words = (batch, LossOptions(label_smoothing=0.2, z_loss=1e-2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP warns about views
        loss = kind.parallel.loss_sum(kind.net, *words)
    close(loss, base.Parallel().loss_sum(truth.net, *words), LOSS_RTOL)


@on_ranks(2)
def test_a_net_that_states_its_context_plan_wrongly_is_refused():
    build("context_parallel", own_nets.DividesSequences)
    check_refused(
        "context_parallel",
        {
            own_nets.AttendsToItsPart: LOGITS,
            own_nets.ForgetsItsPositions: LOGITS,
            own_nets.MixesNeighbors: LOGITS,
        },
    )
