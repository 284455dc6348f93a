"""A run that is interrupted and resumed equals the same run that was never stopped.

TABLE has the words of each run, and the starts before the last one, with how each of them ends.
One function compares the last checkpoint bit for bit, and metrics.jsonl row for row.
"""

from __future__ import annotations

import json
import resource
from dataclasses import dataclass

import pytest

from tests.lit.own.callbacks import STOP
from tests.run import Run, same, train

OWN = "tests.lit.own"
PARTS = f"{OWN}.callbacks"
LIGHTNING = "lightning.pytorch.callbacks"
NET = (
    "model=gpt_nano", "model.d_model=16", "model.n_heads=2", "model.n_layers=1",
    "model.dropout=0.1",
)  # fmt: skip
DATA = ("data.num_samples=16", "data.val.num_samples=6")
# Seven steps of two micro-batches. An epoch has four steps, a validation follows every third step.
LOOP = (
    "data.seq_len=17", "data.batch_size=2", "data.global_batch_size=4", "trainer.max_steps=7",
    "trainer.max_epochs=9", "trainer.val_check_interval=3", "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "logger=none",
)  # fmt: skip
TINY = (*NET, *DATA, *LOOP)
PLAIN = (*TINY, "callbacks=none")
EARLY = f"+callbacks.early={{_target_: {LIGHTNING}.EarlyStopping, monitor: val/loss, patience: %d}}"
TOP = (
    "+module.metrics.top={_target_: torchmetrics.classification.MulticlassAccuracy,"
    " num_classes: 256, top_k: 9, average: micro}"
)
DRAWS = f"+callbacks.draws._target_={PARTS}.Draws"
# EMA replaces the weights for a validation, before which the step is saved.
AVERAGED = (
    *TINY, "callbacks=ema", "callbacks.ema.decay=0.5", "callbacks.sample.n_tokens=4",
    "scheduler.total_steps=7", EARLY % 9, TOP,
)  # fmt: skip
RICH = (*AVERAGED, DRAWS)
LLAMA = (
    "model=llama_nano", "model.d_model=32", "model.n_heads=4", "model.n_kv_heads=2",
    "model.d_ff=40", "model.n_layers=2",
)  # fmt: skip
SAMPLES = (
    f"{{_target_: {OWN}.data.Samples, seq_len: 18, vocab_size: 256, num_samples: %d, seed: %d}}"
)
MIXTURE = (
    "data=mixture",
    f"+data.parts.a={{weight: 3, train: {SAMPLES % (11, 1)}, val: {SAMPLES % (3, 2)}}}",
    f"+data.parts.b={{weight: 1, train: {SAMPLES % (10, 3)}, val: {SAMPLES % (3, 4)}}}",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """A start of a run.

    Attributes:
        how: How it is stopped (`Stop`). It ends by itself if this is empty.
        at: Hook in which it is stopped.
        step: Number of steps that are done then.
        code: Exit code.
        rank: Rank that is stopped.
        words: Words that only this start has.
        ranks: Number of ranks.
    """

    how: str = ""
    at: str = ""
    step: int = 0
    code: int = 0
    rank: int = 0
    words: tuple[str, ...] = ()
    ranks: int | None = None


def asked(at: str, step: int, how: str = "SIGTERM", **more) -> Start:
    return Start(how, at, step, code=75, **more)


def failed(at: str, step: int, **more) -> Start:
    return Start("error", at, step, code=70, **more)


def killed(at: str, step: int, **more) -> Start:
    return Start("SIGKILL", at, step, code=-9, **more)


def full_disk(at: str, step: int) -> Start:
    return Start("full", at, step, code=74)


def until(step: int, *words: str, ranks: int | None = None) -> Start:
    return Start(words=(*words, f"trainer.max_steps={step}"), ranks=ranks)


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        words: Words of the run.
        starts: Starts before the last one.
        ranks: Number of ranks.
        rtol: Relative error up to which losses and weights are equal, if not bit for bit. It is
            for a run that does not always have the same ranks.
        base: Words of a run whose folder is `init_from`.
    """

    words: tuple[str, ...]
    starts: tuple[Start, ...]
    ranks: int = 1
    rtol: float = 0.0
    base: tuple[str, ...] = ()


TABLE = {
    # Ways of stopping
    "signals in each hook, and an error in a step": Row(RICH, (
        asked("on_train_start", 0), asked("on_before_backward", 1, "SIGINT"),
        failed("on_before_backward", 2), asked("on_save_checkpoint", 3),
        asked("on_validation_batch_end", 3), asked("on_train_epoch_end", 4),
        asked("on_train_batch_start", 5, "SIGUSR1"),
        asked("on_validation_start", 6), Start("SIGTERM", "on_validation_batch_end", 7),
    )),
    "errors": Row(AVERAGED, (
        failed("on_before_backward", 1), failed("on_validation_batch_end", 3),
        failed("on_train_epoch_end", 4), failed("on_train_batch_end", 5),
        failed("on_validation_batch_end", 7),
    )),
    "errors in a validation at the end of an epoch, and after it": Row(
        (*PLAIN, DRAWS, EARLY % 9, "trainer.val_check_interval=4"),
        (failed("on_validation_batch_end", 4), failed("on_train_epoch_end", 4)),
    ),
    "gradients that are not numbers, under Muon": Row(
        (*PLAIN, "optimizer=muon", "scheduler._target_=torch.optim.lr_scheduler.StepLR",
         "+scheduler.step_size=1"), (Start("nan", "on_before_backward", 2, code=79),),
    ),
    "a signal in the last step of an epoch": Row(
        (*PLAIN, DRAWS), (asked("on_before_backward", 3),)
    ),
    "SIGKILL": Row(RICH, (
        killed("on_before_backward", 5, words=("checkpoint.every_n_steps=2",)),
        killed("in_save", 6),
    )),
    "a signal between EarlyStopping and min_steps": Row(
        (*PLAIN, EARLY.replace("patience: %d", "stopping_threshold: 99"), "trainer.max_steps=6",
         "trainer.min_steps=6"), (asked("on_before_backward", 4),),
    ),
    "a stop by a callback within a step": Row((*PLAIN, DRAWS, "trainer.limit_val_batches=0"), (
        Start("should_stop", "on_before_backward", 4),
    )),
    "a full disk": Row(RICH, (
        full_disk("on_train_batch_start", 1), full_disk("in_save", 3), full_disk("in_save", 6),
    )),
    "a shorter run, by epochs": Row((*RICH, "trainer.val_check_interval=4"), (
        until(-1, "trainer.max_epochs=1"),
    )),
    # What has a state
    "Muon in bf16 on a mixture, read by a worker": Row(
        (*NET, *LOOP, "callbacks=none", "optimizer=muon", "trainer.precision=bf16-mixed",
         *MIXTURE, "data.num_workers=1"),
        (asked("on_train_batch_end", 2),),
    ),
    "samples with random numbers, read by two workers": Row(
        (*PLAIN, *(f"data.{name}._target_={OWN}.data.RandomSamples" for name in ("train", "val")),
         "data.num_workers=2"),
        (asked("on_train_batch_end", 2), failed("on_validation_batch_end", 6)),
    ),
    "samples with random numbers, read by the training process": Row(
        (*PLAIN, f"data.train._target_={OWN}.data.RandomSamples"),
        (asked("on_train_batch_end", 2),),
    ),
    "a stream, read by two workers": Row(
        (*PLAIN, f"data.train._target_={OWN}.data.Stream", "data.num_workers=2"),
        (failed("on_before_backward", 1), asked("on_train_batch_end", 4)),
    ),
    "steps that are not finite": Row(
        (*PLAIN, "on_nonfinite=skip", "scheduler._target_=torch.optim.lr_scheduler.StepLR",
         "+scheduler.step_size=2",
         f"+callbacks.scales={{_target_: {PARTS}.SpikesLoss, steps: [1, 4], factor: inf}}"),
        (asked("on_train_batch_end", 2),),
    ),
    "a spike, and the losses before it": Row(
        (*PLAIN, "on_spike=skip", "spike.window=4",
         f"+callbacks.scales={{_target_: {PARTS}.SpikesLoss, steps: [5], factor: 100.0}}"),
        (asked("on_train_batch_end", 4),),
    ),
    "ReduceLROnPlateau, and EarlyStopping that ends the run": Row(
        (*PLAIN, "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
         "+scheduler.patience=0", "+scheduler.threshold=10.0", "trainer.val_check_interval=1",
         "allow_changes=[optimizer.lr]",  # allows what a start before has changed
         (EARLY % 4).replace("patience", "min_delta: 9.0, patience")),
        (asked("on_validation_batch_end", 3),),
    ),
    "a module with weights, an optimizer and a schedule": Row(
        (*PLAIN, f"module._target_={OWN}.modules.OwnModule", "+module.kind=epoch",
         f"+callbacks.mean._target_={LIGHTNING}.WeightAveraging"),
        (asked("on_train_batch_end", 5),),
    ),
    "a module's own average of a weight, and means over an epoch": Row(
        (*PLAIN, f"module._target_={OWN}.modules.Averages", "trainer.val_check_interval=4",
         f"+callbacks.early={{_target_: {LIGHTNING}.EarlyStopping, monitor: train/epoch_mean,"
         " check_on_train_epoch_end: true}"),
        (asked("on_train_batch_end", 2), asked("on_validation_batch_end", 4),
         asked("on_train_batch_end", 6)),
    ),
    "a callback that freezes a block": Row(
        (*PLAIN, f"+callbacks.freezes._target_={PARTS}.Freezes"),
        (asked("on_train_batch_end", 4),),
    ),
    "adapters of a frozen net": Row(
        ("experiment=lora", *LLAMA, *DATA, *LOOP, "callbacks=none"),
        (asked("on_train_batch_end", 2),), base=(*LLAMA, *DATA, *LOOP, "callbacks=none"),
    ),
    # Ranks
    "DDP: a SIGKILL of one rank in a validation": Row(
        (*PLAIN, DRAWS, TOP, "strategy=ddp", "data.batch_size=1"),
        (killed("on_validation_batch_end", 6),), ranks=2,
    ),
    "a rank with another config": Row(
        (*PLAIN, "strategy=ddp", "data.batch_size=1"),
        (Start(code=2, words=('optimizer.weight_decay="${oc.decode:${oc.env:RANK}}"',)),), ranks=2,
    ),
    "FSDP: an error of one rank, then its SIGTERM in a save": Row(
        (*PLAIN, DRAWS, EARLY % 9, "strategy=fsdp", "data.batch_size=1"),
        (failed("on_validation_batch_end", 3, rank=1), asked("on_save_checkpoint", 6, rank=1)),
        ranks=2,
    ),
    "other ranks and other strategies": Row(
        (*LLAMA, *DATA, *LOOP, "callbacks=none", "data.global_batch_size=8",
         "trainer.val_check_interval=1", "scheduler.total_steps=7"),
        (until(1), until(2, "strategy=ddp", ranks=2), until(3, "strategy=fsdp", ranks=2),
         until(4, "strategy=tensor_parallel", ranks=2),
         until(6, "strategy=pipeline", "data.batch_size=8", ranks=2)), rtol=1e-4,
    ),
}  # fmt: skip
SLOW = {
    "a pipeline": Row(
        (*PLAIN, DRAWS, "model.n_layers=2", "strategy=pipeline", "data.batch_size=4"),
        (asked("on_train_batch_end", 1, rank=1),), ranks=2,
    ),
    "four ranks, then two, then one": Row(
        (*LLAMA, *DATA, *LOOP, "callbacks=none", "data.global_batch_size=8",
         "trainer.val_check_interval=1", "scheduler.total_steps=7"),
        (until(1, "strategy=fsdp", ranks=4),
         until(2, "strategy=fsdp_tensor_parallel", ranks=4),
         until(3, "strategy=ddp_pipeline", "data.batch_size=4", ranks=4),
         until(4, "strategy=fsdp", "strategy.replicas=2", ranks=4),
         until(5, "strategy=context_parallel", ranks=2)), rtol=1e-4,
    ),
}  # fmt: skip
ROWS = [pytest.param(row, id=name) for name, row in TABLE.items()]
ROWS += [pytest.param(row, id=name, marks=pytest.mark.slow) for name, row in SLOW.items()]


@pytest.fixture
def disk_limit():
    """Give this process its own limit of file sizes back."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("row", ROWS)
def test_an_interrupted_run_ends_as_one_that_was_never_stopped(row, tmp_path, disk_limit):
    words = (*row.words, f"+callbacks.stop._target_={PARTS}.Stop")
    if row.base:
        words = (*words, f"init_from={train(*row.base).folder}")
    whole = begin(words, Start(), row)
    words = (*words, f"run_dir={tmp_path}/run", "ckpt_path=last")
    for number, start in enumerate((*row.starts, Start())):
        run = begin(words, start, row, number)
        disk_limit()
        assert run.code == start.code, (start, run.code, run.out + run.err)
    found = same(lasting(run), lasting(whole), row.rtol)
    state, expected = run.state(), whole.state()
    if row.rtol:
        found += same(state["weights"], expected["weights"], row.rtol)
    else:
        found += same(state, expected)
    assert not found, found[:9]


def begin(words: tuple[str, ...], start: Start, row: Row, number: int = 0) -> Run:
    """Make a start. torchrun restarts its ranks under another number."""
    ranks = start.ranks or row.ranks
    env = {"TORCHELASTIC_RESTART_COUNT": f"{number}"} if ranks > 1 else {}
    if start.how:
        env[STOP] = json.dumps([start.how, start.at, start.step, start.rank])
    return train(*words, *start.words, ranks=ranks, env=env, own_process=start.how == "SIGKILL")


def lasting(run: Run) -> list[dict]:
    """Return the rows of metrics.jsonl without the columns that are times."""
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in run.rows]
