"""Losses, nets and modules of a user train as they were written: right values by plain torch.

`self.loss` is the mean over the targets of the whole step if they are those of the batch, and else
the mean over the targets that it was given, averaged over micro-steps and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from gptrain.models import SimpleGPT
from tests.run import Run, train
from tests.truth.own import LOSSES

OWN = "tests.truth.own"
COMMON = (
    "seed=5", "scheduler=constant", "trainer.accelerator=cpu", "trainer.log_every_n_steps=1",
    "trainer.gradient_clip_val=null", "trainer.enable_progress_bar=false", "logger=none",
    "callbacks=none", "checkpoint=none", "strategy.timeout_s=60",
)  # fmt: skip
NET = {"vocab_size": 32, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 12}
# A step has two micro-batches of two samples for each rank.
LOSS_WORDS = (
    *COMMON, "model=gpt_nano", *(f"model.{key}={value}" for key, value in NET.items()),
    f"data.train._target_={OWN}.Ragged", f"data.val._target_={OWN}.Ragged", "data.num_samples=96",
    "data.seq_len=12", "data.val.num_samples=8", "data.batch_size=2",
    "optimizer._target_=torch.optim.SGD", "~optimizer.betas", "~optimizer.eps",
    "optimizer.fused=false", "+optimizer.momentum=0.9", "optimizer.weight_decay=0",
    "optimizer.lr=0.1", "trainer.accumulate_grad_batches=2",
    f"+callbacks.record={{_target_: {OWN}.Record, norms: true}}",
)  # fmt: skip
CLIPPED = "trainer.gradient_clip_val=0.5"


@dataclass
class Row:
    """A run: its place, the losses of its steps, its module, and the form of its batches.

    Attributes:
        max_norm: Largest norm of the gradients, after which they are clipped.
        is_named: Whether the targets of the batch are known to the library.
    """

    place: str
    losses: tuple[str, ...]
    words: tuple[str, ...] = ()
    module: str = "OwnLosses"
    form: str = "pair"
    max_norm: float | None = None
    is_named: bool = True


TABLE = {
    "every loss": Row("single", (*LOSSES,), (CLIPPED,), max_norm=0.5),
    "dicts": Row("single", ("plain", "outputs"), form="dict"),
    "a third part": Row("single", ("plain", "outputs"), form="weighted", is_named=False),
    "unknown keys": Row(
        "single", ("plain", "outputs"), (CLIPPED,), form="named", max_norm=0.5, is_named=False
    ),
    "masked on the way": Row("single", ("plain",), module="MaskedOnTheWay", is_named=False),
    "DDP, clipped in a hook": Row("ddp", (*LOSSES,), module="ClipsInHook", max_norm=0.5),
    "tensor parallel": Row("tensor_parallel", ("outputs", "backwards", "masked")),
    "context parallel": Row("context_parallel", ("outputs", "quarter")),
    "pipeline, clipped by the module": Row(
        "pipeline", ("backwards", "quarter", "twice"), module="ClipsByTrainer", max_norm=0.5
    ),
}
SHARED = ("tensor_parallel", "context_parallel", "pipeline")  # all ranks read the same samples


def run_losses(place: str, losses: tuple[str, ...], *words: str, module="OwnLosses") -> Run:
    """Train with these losses, one in each step."""
    own = (f"module._target_={OWN}.{module}", f"+module.losses=[{','.join(losses)}]")
    steps = f"trainer.max_steps={len(losses)}"
    if place == "pipeline":
        words = (*words, "strategy.microbatches=2")
    ranks = 1 if place == "single" else 2
    return train(*LOSS_WORDS, f"strategy={place}", *own, steps, *words, ranks=ranks)


def plain_steps(row: Row, records: list[dict]) -> tuple[list[float], list[float]]:
    """Train on the batches of a run; return the losses, and gradient norms before clipping."""
    torch.manual_seed(5)
    net = SimpleGPT(**NET, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    losses, norms = [], []
    for step, name in enumerate(row.losses):
        batches = [batch[:2] for record in records for batch in record["steps"][step]]
        n_targets = sum(int((targets != -100).sum()) for _, targets in batches)

        def loss(tokens, targets, batches=batches, n_targets=n_targets):
            total = cross_entropy(net(tokens).mT, targets, reduction="sum")
            is_of_batch = any(torch.equal(targets, of_batch) for _, of_batch in batches)
            if row.is_named and is_of_batch:
                return total * len(batches) / n_targets
            return total / (targets != -100).sum()

        own = [LOSSES[name](loss, net, tokens, targets.clone()) for tokens, targets in batches]
        optimizer.zero_grad()
        mean = sum(own) / len(own)
        mean.backward()
        norms.append(float(clip_grad_norm_(net.parameters(), row.max_norm or 1e9)))
        optimizer.step()
        losses.append(mean.item())
    return losses, norms


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_loss_of_the_user_has_the_value_that_was_written(row):
    forms = [f"+data.{part}.form={row.form}" for part in ("train", "val")]
    run = run_losses(row.place, row.losses, *row.words, *forms, module=row.module)
    assert run.code == 0, run.err
    records = [torch.load(path) for path in sorted(run.folder.glob("batches-*.pt"))]
    losses, norms = plain_steps(row, records[:1] if row.place in SHARED else records)
    assert run.column("train/loss") == pytest.approx(losses, rel=2e-6)
    assert max(norms) > 0.5
    if row.module != "ClipsInHook":
        assert run.column("grad_norm") == pytest.approx(norms, rel=2e-5)
    if row.place not in SHARED:  # gradients are full, and a hook sees them all
        for record in records:
            assert record["norms"] == pytest.approx(norms, rel=2e-5)
    is_other = not row.is_named or {"masked", "in place", "backwards"} & {*row.losses}
    assert run.out.count("\nloss ") == bool(is_other)


def check_refused(run: Run, key: str) -> None:
    """Check that a run ends with one line that begins with a key."""
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert run.code == 2 and len(errors) == 1 and "Traceback" not in run.err, run.err
    assert errors[0].startswith(f"error: {key}"), errors


def test_a_penalty_on_weights_of_which_a_rank_has_a_part_is_refused():
    check_refused(run_losses("fsdp", ("weights",)), "strategy")


def test_what_a_pipeline_would_compute_for_one_stage_only_is_refused_in_every_step():
    later = f"+callbacks.later._target_={OWN}.ClipsLater"
    run = run_losses("pipeline", ("plain",) * 3, later)
    check_refused(run, "strategy.name=pipeline: ")
    assert run.column("step") == [1, 2]  # the first two steps are right


# Nets. 16 samples of 8 positions are read in steps of 2.

GPT_KEYS = ("d_model", "n_heads", "n_layers", "max_seq_len", "dropout", "activation")
OWN_NET = ("model=gpt_nano", *(f"~model.{key}" for key in GPT_KEYS))
NET_WORDS = (
    *COMMON, *OWN_NET, "model.vocab_size=64", "data.seq_len=9", "data.num_samples=16",
    "data.val.num_samples=4", "data.batch_size=2", "optimizer.lr=1e-2",
    "trainer.max_steps=3", "trainer.val_check_interval=3",
)  # fmt: skip
PIPELINE = ("strategy=pipeline", "strategy.microbatches=2")
FSDP = ("strategy=fsdp", "data.batch_size=1")  # two ranks read the step of one process
FIND = "strategy.find_unused_parameters=true"


def run_net(net: str, *words: str, ranks: int = 1) -> Run:
    return train(*NET_WORDS, f"model._target_={OWN}.{net}", *words, ranks=ranks)


def losses_of(run: Run) -> list[float]:
    assert run.code == 0, run.err
    losses = run.column("train/loss") + run.column("val/loss")
    assert len(losses) == 4
    return losses


def test_a_pipeline_trains_a_chain_in_which_a_block_stands_twice_and_refuses_one_that_changes():
    expected = losses_of(run_net("SharesActivation"))
    found = losses_of(run_net("SharesActivation", *PIPELINE, ranks=2))
    assert found == pytest.approx(expected, rel=1e-5)
    check_refused(run_net("SkipsBlocks", *PIPELINE, ranks=2), "strategy.name=pipeline: ")


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_that_change_buffers_cannot_run_twice(mode):
    word = f"model.activation_checkpointing={mode}"
    check_refused(run_net("BatchNormNet", word), f"{word}: ")


def test_ranks_that_use_different_parameters_train_as_one_process():
    each = ("data.batch_size=1", "trainer.accumulate_grad_batches=2")
    expected = losses_of(run_net("MixtureOfExperts", *each))
    found = losses_of(run_net("MixtureOfExperts", *FSDP, FIND, ranks=2))
    assert found == pytest.approx(expected, rel=1e-4)


def test_without_the_option_such_a_step_ends_the_run():
    run = run_net("MixtureOfExperts", *FSDP, ranks=2)
    check_refused(run, "strategy.find_unused_parameters=false: ")
    assert FIND in run.err


# Each sample of a step and of an evaluation counts once, and the set is that of one process.

GPT = ("model=gpt_nano", "model.d_model=16", "model.n_heads=2", "model.n_layers=2")
SET_WORDS = (
    "model.vocab_size=64", "data.seq_len=9", "data.num_samples=16", "data.val.num_samples=21",
    "data.batch_size=4", "trainer.max_steps=2", "trainer.val_check_interval=2",
)  # fmt: skip
SUMS = (f"module._target_={OWN}.Sums", f"+callbacks.sums._target_={OWN}.CountsBatches")


def values(*words: str, strategy: str = "") -> dict[str, float]:
    """Return all logged values of a run, on two ranks if a strategy is named."""
    words = (*COMMON, *SET_WORDS, *words, *([f"strategy={strategy}"] if strategy else []))
    run = train(*words, ranks=2 if strategy else 1)
    assert run.code == 0, run.err
    return {key: value for row in run.rows for key, value in row.items()}


def test_sums_count_each_sample_once():
    found = values(*GPT, *SUMS, strategy="pipeline")
    counts = {f"val/{name}": 21 * 8 for name in ("n", "metric", "callback")}
    assert found.items() >= {"train/n": 4 * 8, **counts}.items()


def test_a_limited_evaluation_reads_the_same_set_on_any_number_of_ranks():
    words = (*GPT, *SUMS, "trainer.limit_val_batches=0.4")
    alone = values(*words)
    shared = values(*words, "data.batch_size=2", strategy="fsdp")
    names = ("train/loss", "train/n", "val/loss", "val/n", "val/metric", "val/callback")
    assert [shared[n] for n in names] == pytest.approx([alone[n] for n in names], rel=1e-5)
    assert alone["val/n"] == 2 * 4 * 8


def test_a_net_that_sees_padding_is_refused_also_if_no_sample_of_the_run_needs_it():
    net = (*OWN_NET, "model._target_=tests.strategies.own_nets.SeesAll")
    run = train(*COMMON, *SET_WORDS, *net, "strategy=tensor_parallel", ranks=2)
    check_refused(run, "strategy.name=tensor_parallel: ")


def test_a_causal_net_may_be_evaluated_on_samples_of_another_length():
    words = (*GPT, "data.val.seq_len=8")
    found, expected = values(*words, strategy="context_parallel"), values(*words)
    assert found["val/loss"] == pytest.approx(expected["val/loss"], rel=1e-5)
