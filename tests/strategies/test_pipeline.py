"""Evaluation and the forward pass of a pipeline of two ranks."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kinds import (
    LOSS_RTOL,
    MAX_NORM,
    OneProcess,
    Parallel,
    check_equals_one_process,
    check_logits_of_documents,
    close,
    make_batch,
    make_documents,
)
from ranks import on_ranks

from gptrain.core.strategies import ParallelDims, default_options
from gptrain.loss import PLAIN_CROSS_ENTROPY
from gptrain.models.attention import layout_argument
from gptrain.parallel.base import Batch
from gptrain.parallel.pipeline import Pipeline
from gptrain.parallel.requirements import IncompatibleModelError


def loss_of_one_process(tokens, targets, documents=None):
    """Return the sum of a batch's losses, computed by the unpartitioned net."""
    logits = OneProcess().net(tokens, **layout_argument(documents)).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum").detach()


@on_ranks(2)
def test_a_batch_that_is_not_divisible_by_the_microbatches_is_evaluated():
    """The evaluation has no gradients, and its dtype does not depend on torch's default dtype.

    In a step with trainer.precision=bf16-true or 64-true, the default dtype is bf16 or fp64.
    """
    tokens, targets = (part[:6] for part in make_batch(0, 0))
    expected = loss_of_one_process(tokens, targets)
    for schedule in ("1f1b", "gpipe"):
        kind = Parallel("pipeline", schedule=schedule)
        for dtype in (torch.bfloat16, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                loss = kind.parallel.loss_sum(kind.net, Batch(tokens, targets), PLAIN_CROSS_ENTROPY)
            finally:
                torch.set_default_dtype(torch.float32)
            close(loss, expected, LOSS_RTOL)
            assert loss.dtype == torch.float32
        for n_positions in (11, 15, 4):  # the same number of sequences, with another length
            batch = tokens[:, :n_positions], targets[:, :n_positions]
            loss = kind.parallel.loss_sum(kind.net, Batch(*batch), PLAIN_CROSS_ENTROPY)
            close(loss, loss_of_one_process(*batch), LOSS_RTOL)
        documents = make_documents()[:6]
        packed = Batch(tokens, targets, documents)
        loss = kind.parallel.loss_sum(kind.net, packed, PLAIN_CROSS_ENTROPY)
        expected_sum = loss_of_one_process(tokens, targets, documents)
        close(loss, expected_sum, LOSS_RTOL)
        with torch.no_grad():  # the mean of a validation batch
            mean = kind.parallel.mean_loss(kind.net, packed, PLAIN_CROSS_ENTROPY)
        close(mean, expected_sum / (targets != -100).sum(), LOSS_RTOL)
        check_logits_of_documents(kind)
        assert all(p.grad is None for p in kind.net.parameters())
    check_equals_one_process(kind, packs=True)


def test_the_groups_of_a_rank_of_two_pipelines_with_three_ranks():
    """Only the first and the last rank of a pipeline share a tied weight."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=5, world_size=6)
    try:
        options = default_options("ddp_pipeline").model_copy(update={"microbatches": 9})
        parallel = Pipeline(options, ParallelDims(data=2, pipeline=3))
        groups = (parallel.group, parallel.data_group, parallel.ends_group)
        ranks = [dist.get_process_group_ranks(group) for group in groups]
        copies = parallel.replicas.mesh.tolist()
    finally:
        dist.destroy_process_group()
    assert ranks == [[1, 3, 5], [4, 5], [1, 5]] and copies == [4, 5]
    assert (parallel.rank, parallel.last, parallel.microbatches) == (2, 2, 9)
    assert parallel.n_stages == 3


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_of_three_stages_the_first_counts_extra_parameters_and_the_last_sends_metrics(stage):
    dist.init_process_group("fake", store=dist.HashStore(), rank=stage, world_size=3)
    try:
        parallel = Pipeline(default_options("pipeline"), ParallelDims(pipeline=3))
    finally:
        dist.destroy_process_group()
    module = torch.nn.Module()
    module.net = parallel.net = torch.nn.Linear(1, 1)
    module.scale = torch.nn.Parameter(torch.ones(2))
    parallel.prepare(module, torch.optim.SGD(module.parameters()))
    assert parallel.counted_on_other_stage == (set() if stage == 0 else {module.scale})
    with patch.object(dist, "broadcast_object_list") as sent:  # a metric, from the last stage
        parallel.broadcast_metric(lambda: torch.ones(()))
    assert sent.call_args.args[0] == [torch.ones(()) if stage == 2 else None]
    assert sent.call_args.kwargs == {"group": parallel.group, "group_src": 2}


@on_ranks(2)
def test_parameters_outside_the_net_count_once_in_the_gradient_norm():
    """Each rank holds them, as it holds the tied weight. The norm of the net is clipped before."""
    kind = Parallel("pipeline")
    kind.module.scale = torch.nn.Parameter(torch.ones(2))
    kind.parallel.prepare(kind.module, kind.optimizer)
    kind.step(0)
    kind.module.scale.grad = torch.tensor([3.0, 4.0])
    norm = kind.parallel.measure_and_clip([*kind.module.parameters()], None)
    close(norm, torch.tensor(MAX_NORM**2 + 25).sqrt(), LOSS_RTOL)
    trained = [kind.module.scale] if kind.parallel.rank == 0 else []  # the other trains nothing
    assert kind.parallel.measure_and_clip(trained, None) == 5.0


@on_ranks(2)
def test_a_full_forward_pass_is_refused_and_the_error_names_the_method_to_call():
    tokens, _ = make_batch(0, 0)
    kind = Parallel("pipeline")
    for call in (kind.net, kind.net.hidden):
        with pytest.raises(
            IncompatibleModelError, match=r"no rank of a pipeline .* self.loss\(tokens, targets\)"
        ):
            call(tokens)
