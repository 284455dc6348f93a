"""What a step that is not logged does besides computing: nearly nothing, counted on a real run."""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass, field
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from gptrain.assemble import trainer
from gptrain.data import DummyTextDataset, collate
from gptrain.lit import LanguageModel, finite
from gptrain.lit.callbacks import CollectGarbage
from gptrain.lit.loggers import CSVLogger
from gptrain.lit.step import STEP_HOOKS, trim_step
from gptrain.lit.trainer import FetchClock, NoProfiler
from gptrain.models import SimpleGPT

N_STEPS, LOGGED_EVERY = 9, 4
LOGGED = (4, 8, 9)  # the last step, too
ACCUMULATED = 2
TOKENS, V = 32 * 16, 256  # of a micro-batch: two chunks of the loss


@dataclass
class Seen:
    """One optimizer step, up to the beginning of the next one."""

    reads: int = 0  # of a tensor on the host: item(), float(), bool()
    largest: int = 0  # elements of the largest tensor that was made
    logged: int = 0  # calls of a logger
    collector_was_on: bool = False
    collections: int = 0  # of garbage


@dataclass
class Watch(TorchDispatchMode):
    """Attributes what torch does to the optimizer step that is being taken."""

    steps: list[Seen] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if self.steps:
            now = self.steps[-1]
            now.reads += op is torch.ops.aten._local_scalar_dense.default
            sizes = [leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
            now.largest = max([now.largest, *sizes])
        return result


@pytest.fixture
def watched(train, monkeypatch):
    """Trains and tells what was seen of each step: steps[0] is the first one's."""

    def run(*overrides: str) -> list[Seen]:
        watch, training_step, log = Watch(), LanguageModel.training_step, CSVLogger.log_metrics
        collect_garbage = gc.collect

        def step(self, batch, batch_idx):
            if batch_idx % ACCUMULATED == 0:
                watch.steps.append(Seen())
            watch.steps[-1].collector_was_on |= gc.isenabled()
            return training_step(self, batch, batch_idx)

        def log_metrics(self, *args, **kwargs):
            watch.steps[-1].logged += 1
            return log(self, *args, **kwargs)

        def collect(*generation):
            if watch.steps:
                watch.steps[-1].collections += 1
            return collect_garbage(*generation)

        monkeypatch.setattr(LanguageModel, "training_step", step)
        monkeypatch.setattr(CSVLogger, "log_metrics", log_metrics)
        monkeypatch.setattr(gc, "collect", collect)
        with watch:
            done = train(
                f"trainer.max_steps={N_STEPS}",
                f"trainer.log_every_n_steps={LOGGED_EVERY}",
                f"trainer.accumulate_grad_batches={ACCUMULATED}",
                "data.batch_size=32",
                "trainer.limit_val_batches=0",
                "logger=csv",
                *overrides,
            )
        assert done.code == 0, done.err
        assert len(watch.steps) == N_STEPS
        return watch.steps

    return run


def forget(check: finite.FiniteCheck) -> None:
    """settle() without its read."""
    check.asked = None


def between(steps: list[Seen]) -> list[Seen]:
    """The steps that are not logged."""
    return [seen for number, seen in enumerate(steps, start=1) if number not in LOGGED]


def test_a_step_reads_the_norm_of_its_gradients_and_nothing_else(watched):
    assert [seen.reads for seen in between(watched())] == [1] * (N_STEPS - len(LOGGED))


def test_where_the_flag_is_read_a_step_later_nothing_is_read_of_the_step_itself(
    watched, monkeypatch
):
    """What settle() reads was copied to the host a step ago: left out here."""
    monkeypatch.setattr(finite, "is_read_later", lambda norm, opt: finite.is_fused_adam(opt))
    monkeypatch.setattr(finite.FiniteCheck, "settle", forget)
    assert [seen.reads for seen in between(watched())] == [0] * (N_STEPS - len(LOGGED))


def test_no_logger_is_called_and_no_garbage_collected(watched):
    steps = watched()
    assert [n for n, seen in enumerate(steps, start=1) if seen.logged] == list(LOGGED)
    assert not any(seen.collector_was_on for seen in steps)


def test_garbage_is_collected_once_a_step_however_many_micro_batches_it_has(watched, monkeypatch):
    monkeypatch.setattr(trainer, "CollectGarbage", partial(CollectGarbage, every_n_steps=4))
    collections = [seen.collections for seen in watched()]
    assert collections[:-1] == [0, 0, 0, 1, 0, 0, 0, 1]  # after the last one the run ends


def fetch(clock: FetchClock) -> float:
    """Seconds that are counted of a fetch of 10 ms."""
    before_s = clock.waited_s
    clock.start()
    time.sleep(0.01)
    clock.stop()
    return clock.waited_s - before_s


def fit(callback: pl.Callback, trims: bool) -> list[torch.Tensor]:
    """Trains a tiny net for twenty steps of two micro-steps; returns its weights."""
    torch.manual_seed(0)
    net = SimpleGPT(31, 16, n_heads=2, n_layers=1, max_seq_len=8)
    module = LanguageModel(net, lambda net: torch.optim.AdamW(net.parameters()), lambda step: 1.0)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=20, accumulate_grad_batches=ACCUMULATED, gradient_clip_val=0.1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, profiler=NoProfiler() if trims else None,
    )  # fmt: skip
    if trims:
        trim_step(trainer, module)
    trainer.callbacks.append(callback)  # as one may in a notebook
    trainer.fit(module, DataLoader(DummyTextDataset(160, 9, 31), 4, collate_fn=collate))
    return list(net.parameters())


def test_hooks_of_a_step_are_heard_in_lightnings_order_and_change_no_bit_of_it():
    class Listener(pl.Callback):
        def __init__(self):
            self.heard, self.losses = [], []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.heard.append("on_train_batch_end")
            self.losses.append(float(outputs["loss"]))  # of a micro-step, over their number

    for hook in STEP_HOOKS[:-1]:
        setattr(Listener, hook, lambda self, *_, hook=hook: self.heard.append(hook))

    lightnings, ours = Listener(), Listener()
    weights = fit(lightnings, trims=False)
    assert set(lightnings.heard) == set(STEP_HOOKS)
    assert all(map(torch.equal, fit(ours, trims=True), weights))
    assert (ours.heard, ours.losses) == (lightnings.heard, lightnings.losses)
    assert all(map(torch.equal, fit(pl.Callback(), trims=True), weights))


def test_a_step_between_two_logs_calls_lightning_half_as_often():
    """Calls of Python functions, which is what a step of Lightning costs besides torch's work."""

    class CountCalls(pl.Callback):
        calls = 0

        def on_train_start(self, *_):
            sys.setprofile(self.count)

        def on_train_end(self, *_):
            sys.setprofile(None)

        def count(self, frame, event, _):
            self.calls += event == "call" and "/lightning/pytorch/" in frame.f_code.co_filename

    lightnings, ours = CountCalls(), CountCalls()
    fit(lightnings, trims=False)
    fit(ours, trims=True)
    assert ours.calls < 0.5 * lightnings.calls


@pytest.mark.parametrize("profiler", ["simple", "torch"])
def test_a_profile_tells_the_parts_of_a_step(train, profiler):
    run = train("trainer.max_steps=5", f"profiler={profiler}", "trainer.limit_val_batches=0")
    assert run.code == 0, run.err
    profile = (run.folder / "fit-profile.txt").read_text()
    for part in ("training_step", "backward"):
        assert f"[Strategy]Single.{part}" in profile
    assert profiler == "simple" or list(run.folder.glob("*training_step*.json"))  # traces


def test_a_cpu_waits_for_all_of_a_fetch():
    assert fetch(FetchClock(pl.Trainer(accelerator="cpu", logger=False))) >= 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_that_is_busy_all_the_while_waits_for_no_fetch():
    clock = FetchClock(pl.Trainer(accelerator="gpu", devices=1, logger=False))
    torch.cuda._sleep(2**30)  # cycles: half a second
    assert fetch(clock) == 0
    torch.cuda.synchronize()
    assert fetch(clock) >= 0.01


def test_the_logits_of_a_batch_never_exist_at_once(watched):
    assert max(seen.largest for seen in watched()) < TOKENS * V
