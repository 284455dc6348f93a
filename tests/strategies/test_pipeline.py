"""A pipeline of two ranks equals one process, under every schedule."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kinds import LOSS_RTOL, OneProcess, Piped, check_equals_one_process, close, make_batch
from ranks import on_ranks

from gptrain.parallel.fit import Unfit


@on_ranks(2)
def test_gpipe_equals_one_process():
    check_equals_one_process(Piped("gpipe"))


@on_ranks(2)
def test_one_forward_one_backward_equals_one_process():
    check_equals_one_process(Piped("1f1b"))


@on_ranks(2)
def test_interleaved_pipeline_equals_one_process():
    check_equals_one_process(Piped("interleaved_1f1b"))


def _passes(schedule):
    """Forward (F) and backward (B) passes of this rank's blocks, by number, of one micro-step."""
    kind, passes = Piped(schedule), []
    for name, block in kind.net.blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: passes.append("F" + name))
        block.register_full_backward_hook(lambda *_, name=name: passes.append("B" + name))
    tokens, targets = make_batch(0, 0)
    for _ in range(2):
        passes.clear()  # the first begins with a pass that only asks for shapes
        kind.pipeline.train(tokens, targets, kind.loss_sum)
    return list(kind.net.blocks), passes


@on_ranks(2)
def test_a_schedule_decides_what_a_rank_holds_and_the_order_of_its_passes():
    rank = dist.get_rank()
    held, passes = _passes("gpipe")
    assert held == [["0", "1"], ["2", "3"]][rank]
    first = held[0]
    assert [p[0] for p in passes if p[1] == first] == list("FFFFBBBB"), passes
    held, passes = _passes("1f1b")
    first = held[0]
    assert [p[0] for p in passes if p[1] == first] == list(["FFBFBFBB", "FBFBFBFB"][rank])
    held, passes = _passes("interleaved_1f1b")
    assert held == [["0", "2"], ["1", "3"]][rank]
    assert sorted(passes) == sorted(4 * [way + name for name in held for way in "FB"])


@on_ranks(2)
def test_a_batch_that_microbatches_do_not_divide_is_evaluated():
    kind, truth = Piped(), OneProcess()
    tokens, targets = (part[:6] for part in make_batch(0, 0))
    expected = F.cross_entropy(truth.net(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    close(kind.pipeline.evaluate(tokens, targets, kind.loss_sum), expected.detach(), LOSS_RTOL)
    assert all(p.grad is None for p in kind.net.parameters())


@on_ranks(2)
def test_the_loss_is_sent_in_one_type_whatever_torchs_default_is():
    """Which within a step of trainer.precision=bf16-true or 64-true is theirs."""
    kind, batch = Piped(), make_batch(0, 0)
    expected = kind.pipeline.evaluate(*batch, kind.loss_sum)
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            loss = kind.pipeline.evaluate(*batch, kind.loss_sum)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(loss, expected) and loss.dtype == torch.float32


@on_ranks(2)
def test_the_last_stage_alone_computes_the_loss_of_hidden_states():
    tokens, targets = make_batch(0, 0)
    expected = OneProcess().net.hidden(tokens).detach()
    for schedule in ("1f1b", "interleaved_1f1b"):
        kind, seen = Piped(schedule), []

        def note(hidden, targets, seen=seen):
            seen.append((hidden, targets))
            return hidden.new_ones(())

        assert kind.pipeline.evaluate(tokens, targets, note) == 4  # microbatches, on every rank
        assert bool(seen) == (dist.get_rank() == 1)
        if seen:
            assert len(seen) == 4
            close(torch.cat([hidden for hidden, _ in seen]), expected, LOSS_RTOL)
            assert torch.equal(torch.cat([kept for _, kept in seen]), targets)
        kind.pipeline.train(tokens, targets, kind.loss_sum)
        assert len(seen) in (0, 4)  # a later pass has a loss of its own


@on_ranks(2)
def test_a_whole_forward_pass_is_refused_and_says_what_to_call():
    tokens, _ = make_batch(0, 0)
    net = Piped().net
    for call in (net, net.hidden):
        with pytest.raises(Unfit, match=r"no rank of a pipeline .* self.loss\(tokens, targets\)"):
            call(tokens)
