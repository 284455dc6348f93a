"""What a user adds to the loss counts as it was written: right values by plain torch.

`self.loss` is the mean over the targets of the whole step if they are those of the batch, and else
the mean over the targets that it was given, averaged over micro-steps and ranks.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from gptrain.models import SimpleGPT
from tests.truth.own_losses import NET, OWN, see, thin

ACCUMULATE = 2
MICRO = (f"trainer.accumulate_grad_batches={ACCUMULATE}", "data.batch_size=2")
PLACES = {
    "single": MICRO,
    "ddp": ("strategy=ddp", "trainer.devices=2", *MICRO),
    "fsdp": ("strategy=fsdp", "trainer.devices=2", *MICRO),
    "tensor_parallel": ("strategy=tensor_parallel", "trainer.devices=2", *MICRO),
    "context_parallel": ("strategy=context_parallel", "trainer.devices=2", *MICRO),
    "pipeline": ("strategy=pipeline", "strategy.microbatches=2", "trainer.devices=2", *MICRO),
}
SHARED = ("tensor_parallel", "context_parallel", "pipeline")  # all ranks read the same samples
LATER = f"+callbacks.later._target_={OWN}.ClipsLater"
CLIPPED = "trainer.gradient_clip_val=0.8"


def ce(net, tokens, targets, reduction="mean"):
    """Return the cross entropy of the targets that are not -100."""
    return cross_entropy(net(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)


def plain_steps(run, n_ranks, loss_of, of_step=None, max_norm=None):
    """Train with plain torch on the batches that the ranks of a run have read.

    Args:
        run: Run with the batches.
        n_ranks: Number of ranks that read different samples.
        loss_of: Function (net, step, tokens, targets) -> loss of a micro-batch. The loss of a step
            is the mean over its micro-batches.
        of_step: Function (step) -> weight of the mean over all targets of the step, which is
            added, or None.
        max_norm: Largest norm of the gradients, or None.

    Returns:
        The losses, and the gradient norms before clipping.
    """
    torch.manual_seed(5)
    net = SimpleGPT(**NET, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(len(run.batches[0]) // ACCUMULATE):
        micro_batches = [
            batch
            for batches in run.batches[:n_ranks]
            for batch in batches[step * ACCUMULATE :][:ACCUMULATE]
        ]
        loss = sum(loss_of(net, step, *batch) for batch in micro_batches) / len(micro_batches)
        if of_step is not None:
            n_targets = sum(int((targets != -100).sum()) for _, targets in micro_batches)
            total = sum(ce(net, *batch, reduction="sum") for batch in micro_batches)
            loss = loss + of_step(step) * total / n_targets
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(clip_grad_norm_(net.parameters(), max_norm or 1e9)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def squares(net, *_):
    return 0.01 * sum(p.square().sum() for p in net.parameters())


def outputs(net, step, tokens, targets):
    return 0.1 * net(tokens).square().mean()


def masked(net, step, tokens, targets):
    return ce(net, tokens, thin(targets))


def masked_penalty(net, *batch):
    return masked(net, *batch) + outputs(net, *batch)


def backwards(net, step, tokens, targets):
    back = tokens.flip(1)
    return 0.3 * ce(net, back, back.roll(-1, 1))


def nothing(*_):
    return 0.0


def always(step):
    return 1.0


def ramp(step):
    return 1.0 if step < 2 else 0.25


# Module of own_parts -> loss of a micro-batch, weight of the mean over the step, further words.
CASES = {
    "Recorded": (nothing, always, ()),
    "Recorded, dicts": (nothing, always, ("+data.train.form=dict", "+data.val.form=dict")),
    "WeightPenalty": (squares, always, (CLIPPED,)),
    "LogitPenalty": (outputs, always, ()),
    "LogitPenalty, weighted": (
        lambda net, step, *batch: ce(net, *batch) + outputs(net, step, *batch),
        None,
        ("+data.train.form=weighted", "+data.val.form=weighted"),
    ),
    "LogitPenalty, named": (
        lambda net, step, *batch: ce(net, *batch) + outputs(net, step, *batch),
        None,
        ("+data.train.form=named", "+data.val.form=named", CLIPPED),
    ),
    "MaskedPenalty": (masked_penalty, None, (CLIPPED,)),
    "MaskedInPlace": (masked, None, ()),
    "Ramp": (nothing, ramp, ()),
    "TwoLosses": (backwards, always, ()),
    "Unreturned": (nothing, always, ()),
    "SameTwice": (nothing, lambda step: 2.0, ()),
}
RUNS = [
    *(("single", case) for case in CASES if case != "LogitPenalty"),
    ("ddp", "MaskedPenalty"),
    ("pipeline", "TwoLosses"),
    ("tensor_parallel", "LogitPenalty"),
    ("context_parallel", "LogitPenalty"),
]


@pytest.mark.parametrize(("place", "case"), RUNS)
def test_a_loss_of_the_user_has_the_value_that_was_written(place, case, train):
    loss_of, of_step, words = CASES[case]
    run = see(train, case.split(",")[0], *PLACES[place], *words)
    assert run.code == 0, run.text
    n_ranks = 1 if place in SHARED else len(run.batches)
    max_norm = 0.8 if CLIPPED in words else None
    losses, norms = plain_steps(run, n_ranks, loss_of, of_step, max_norm)
    assert run.column("train/loss") == pytest.approx(losses, rel=2e-6)
    assert run.column("grad_norm") == pytest.approx(norms, rel=2e-5)
    if CLIPPED in words:
        assert max(norms) > 0.8
    if place not in (*SHARED, "fsdp"):  # gradients are full, and a hook sees them all
        for seen in run.norms:
            assert seen == pytest.approx(norms, rel=2e-5)
    lines = [line for line in run.text.splitlines() if line.startswith("loss ")]
    assert len(lines) == (of_step is None or case == "TwoLosses"), lines


@pytest.mark.parametrize("place", ["single"])
def test_targets_that_a_hook_of_lightning_masks_are_averaged_like_those_of_the_step(place, train):
    """The batch that training_step gets is masked already."""
    run = see(train, "MaskedOnTheWay", *PLACES[place])
    losses, norms = plain_steps(run, len(run.batches), lambda net, step, *batch: ce(net, *batch))
    assert run.column("train/loss") == pytest.approx(losses, rel=2e-6)
    assert run.column("grad_norm") == pytest.approx(norms, rel=2e-5)


def test_masking_that_begins_later_changes_the_mean_from_then_on(train):
    run = see(train, "MaskedLater", *PLACES["single"])
    later = lambda net, step, *batch: masked(net, step, *batch) if step else 0.0  # noqa: E731
    losses, _ = plain_steps(run, 1, later, lambda step: 0.0 if step else 1.0)
    assert run.column("train/loss") == pytest.approx(losses, rel=2e-6)


@pytest.mark.parametrize("place", ["fsdp"])
def test_a_penalty_on_weights_of_which_a_rank_has_a_part_is_refused_in_one_line(place, train):
    run = see(train, "WeightPenalty", *PLACES[place])
    assert run.code == 2 and "Traceback" not in run.text, run.text
    assert len(run.errors) == 1 and "strategy" in run.errors[0]


@pytest.mark.parametrize(
    "words",
    [("Recorded", LATER)],
    ids=lambda words: words[0],
)
def test_what_a_pipeline_would_compute_for_one_stage_only_is_refused_in_every_step(words, train):
    run = see(train, *words, *PLACES["pipeline"])
    assert run.code == 2 and "Traceback" not in run.text, run.text
    assert len(run.errors) == 1 and "strategy.name=pipeline" in run.errors[0]
    if LATER in words:  # the first two steps are right
        assert run.column("step") == [1, 2]
