"""Runs of train.py, whole ones, each made once and read by all tests that need it.

    run = runs("strategy=fsdp", "trainer.devices=2")
    run.losses(), run.record(rank=1), run.weights()

A run is known by its words: who asks first makes it, in whichever process of the test suite, and
the others wait for it. So every test can run alone (-k). Ranks are forked (tests/forked.py), beyond
that nothing differs from what a person starts; what they did is noted by `own_parts.Record`.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import json
import os
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from own_parts import Ragged
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_leaves_with_path

from gptrain.checkpoints.amendment import load_state

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "strategies")]

RTOL, WEIGHT_RTOL = 1e-5, 1e-4  # fp32 sums in another order differ by 1e-6; Adam divides by them
# Softmax does not see a bias on the keys: its gradient is rounding noise, made steps of by Adam.
NOISE = "k_proj.bias"
N_STEPS, MAX_NORM = 8, 0.5

# V = 61 and T = 15: neither is a multiple of two ranks. One process has two micro-steps of eight
# sequences a step, ranks have some of four, and each another number of targets that count.
MODEL = (
    "model=gpt_nano", "model.vocab_size=61", "model.d_model=32", "model.n_heads=4",
    "model.n_layers=4", "model.max_seq_len=16",
)  # fmt: skip
DATA = (
    "data.train._target_=own_parts.Ragged", "data.train.num_samples=200", "data.train.seed=3",
    "data.val._target_=own_parts.Ragged", "data.val.num_samples=21", "data.val.seed=4",
)  # fmt: skip
WORDS = (
    "data.seq_len=15", "data.batch_size=4", "data.global_batch_size=16",
    "optimizer.lr=1e-3", "scheduler.warmup_steps=2", f"scheduler.total_steps={N_STEPS}",
    f"trainer.gradient_clip_val={MAX_NORM}", f"trainer.max_steps={N_STEPS}",
    "trainer.accelerator=cpu", "trainer.val_check_interval=4", "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false", "strategy.timeout_s=60",
    "callbacks=none", "+callbacks.record._target_=own_parts.Record",
    "checkpoint.keep=9", "logger=csv",
)  # fmt: skip
METRICS = (
    "+module.metrics.accuracy._target_=torchmetrics.classification.MulticlassAccuracy",
    "+module.metrics.accuracy.num_classes=61",
    "+module.metrics.accuracy.average=micro",
    "+module.metrics.accuracy.top_k=10",
    "+module.metrics.counted._target_=own_parts.Counted",
)
PLACES = {
    "single": ("strategy=single", "data.batch_size=8"),
    "ddp": ("strategy=ddp", "trainer.devices=2"),
    "fsdp": ("strategy=fsdp", "trainer.devices=2"),
    "tensor_parallel": ("strategy=tensor_parallel", "trainer.devices=2"),
    "pipeline": ("strategy=pipeline", "trainer.devices=2"),
    "fsdp_tensor_parallel": ("strategy=fsdp_tensor_parallel", "trainer.devices=4"),
    "ddp_pipeline": ("strategy=ddp_pipeline", "trainer.devices=4"),
    "hsdp": ("strategy=fsdp", "strategy.replicas=2", "trainer.devices=4"),
}
# Four processes of two cores wait for each other at every step.
STEPS = {"fsdp_tensor_parallel": 4, "ddp_pipeline": 4, "hsdp": 4}
# Runs that are compared bit by bit have half of the blocks.
DROPOUT = (
    "model.dropout=0.1", "model.n_layers=2", "trainer.max_steps=6", "trainer.val_check_interval=3",
)  # fmt: skip


@dataclass
class Run:
    """What is left of a run.

    Attributes:
        said: all that its processes wrote.
    """

    folder: Path
    code: int
    said: str

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """metrics.csv: one row a logged step."""
        with open(self.folder / "metrics.csv", newline="") as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> list[float]:
        """One logged value, of the steps that have it."""
        return [float(row[name]) for row in self.rows if row.get(name)]

    def record(self, rank: int = 0) -> dict:
        """What `own_parts.Record` noted in one rank."""
        return torch.load(self.folder / f"record-{rank}.pt", weights_only=True)

    def checkpoint(self, step: int) -> Path:
        """The folder of one checkpoint."""
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def state(self, step: int) -> dict:
        """All values of a checkpoint: those of its file, and of its ranks' files."""
        path = self.checkpoint(step)
        state = load_state(path)
        if (path / ".metadata").exists():
            state["shards"] = read_shards(path)
        return state

    @property
    def n_steps(self) -> int:
        """How many steps it has taken."""
        return int(self.column("step")[-1])

    def weights(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """The net's after a step, or at the end of the run, whole."""
        import gptrain

        with torch.no_grad():
            net = gptrain.load(self.checkpoint(step or self.n_steps), allowed_targets=["own_parts"])
            return net.state_dict()


class Runs:
    """Makes runs, or finds those that were made.

    Args:
        folder: shared by all processes of the test suite.
    """

    def __init__(self, folder: Path):
        self.folder, self.made = folder, {}

    def __call__(
        self,
        *words: str,
        model: tuple[str, ...] = MODEL,
        data: tuple[str, ...] = DATA,
        code: int = 0,
        begun: Run | None = None,
    ) -> Run:
        """The run of WORDS and these.

        Args:
            model, data: the words of these groups.
            code: the exit code that it must end with.
            begun: go on in a copy of this run's folder.
        """
        words = (*WORDS, *model, *data, *words)
        key = json.dumps([words, begun and begun.folder.name])
        if key not in self.made:
            self.made[key] = self._find_or_make(key, words, begun)
        run = self.made[key]
        if run.code != code:
            pytest.fail(f"exit code {run.code}, not {code}:\n{run.said}", pytrace=False)
        return run

    def _find_or_make(self, key: str, words: tuple[str, ...], begun: Run | None) -> Run:
        name = hashlib.sha1(key.encode()).hexdigest()[:12]
        folder, end = self.folder / name, self.folder / f"{name}.json"
        said = self.folder / f"{name}.txt"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            if not end.exists():
                shutil.rmtree(folder, ignore_errors=True)
                if begun is not None:
                    shutil.copytree(begun.folder, folder)
                code = run_train([*words, f"run_dir={folder}"], said)
                end.write_text(json.dumps(code))
        return Run(folder, json.loads(end.read_text()), said.read_text(errors="replace"))


def run_train(words: list[str], said: Path) -> int:
    """Exit code of `python train.py <words>`, in this process and ranks forked for it."""
    from forked import forked_ranks

    import train
    from gptrain.config import cli

    with open(said, "a", buffering=1) as file:
        print("python train.py", *words, file=file)
        with redirect_stdout(file), redirect_stderr(file), forked_ranks(said, said):
            try:
                return cli.run_command(train.main, words)
            finally:
                if dist.is_initialized():  # a group of this process alone
                    dist.destroy_process_group()


def read_shards(path: Path) -> dict:
    """The tensors of a sharded checkpoint, by torch's own reader."""
    with TemporaryDirectory() as folder:
        dcp_to_torch_save(path, f"{folder}/whole")
        return torch.load(f"{folder}/whole", weights_only=True)


def differences(mine: object, theirs: object) -> list[str]:
    """Where two states differ, bit by bit."""
    mine, theirs = (
        {keystr(path): leaf for path, leaf in tree_leaves_with_path(one)} for one in (mine, theirs)
    )
    lone = [f"{place}: in one alone" for place in mine.keys() ^ theirs.keys()]
    return lone + [
        place for place in mine.keys() & theirs.keys() if not same(mine[place], theirs[place])
    ]


def same(mine: object, theirs: object) -> bool:
    """Two values are equal, tensors bit by bit."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(mine, theirs)
    return type(mine) is type(theirs) and mine == theirs


def check_close(mine: list[float], expected: list[float], rtol: float = RTOL) -> None:
    """Two columns are the same but for rounding."""
    assert len(mine) == len(expected) > 0, (mine, expected)
    for a, b in zip(mine, expected, strict=True):
        assert abs(a / b - 1) < rtol, (mine, expected)


def check_weights(run: Run, truth: Run) -> None:
    """Weights at the run's end are the same but for rounding."""
    mine, expected = run.weights(), truth.weights(run.n_steps)
    assert mine.keys() == expected.keys()
    for name, weight in expected.items():
        if NOISE not in name:
            error = ((mine[name] - weight).abs().max() / weight.abs().max()).item()
            assert error < WEIGHT_RTOL, (name, error)


def check_losses(run: Run, truth: Run, rtol: float = RTOL) -> None:
    """Losses, norms before clipping and validations are those of the truth's first steps."""
    for name in ("train/loss", "grad_norm", "val/loss"):
        mine = run.column(name)
        check_close(mine, truth.column(name)[: len(mine)], rtol)


def check_same_run(run: Run, truth: Run) -> None:
    """So are the weights at its end; and gradients were clipped."""
    check_losses(run, truth)
    assert min(run.column("grad_norm")) > MAX_NORM
    check_weights(run, truth)


def check_same_bits(run: Run, whole: Run, since: int = 0) -> None:
    """A run that went on ends as the one that never stopped; its own log begins after a step."""
    assert not differences(run.state(whole.n_steps), whole.state(whole.n_steps))
    columns = ("step", "train/loss", "lr", "grad_norm", "val/loss")
    mine, expected = ([[row.get(c) for c in columns] for row in one.rows] for one in (run, whole))
    assert mine == [row for row in expected if float(row[0]) > since]


# The claims that hold for every strategy, by its name


def plain(runs: Runs, name: str) -> Run:
    """Eight steps, of a mix four, with metrics, without dropout; two micro-steps a pair."""
    n_steps = STEPS.get(name, N_STEPS)
    return runs(*PLACES[name], *METRICS, f"trainer.max_steps={n_steps}")


def check_reads_checkpoints_of(runs: Runs, name: str, source: str) -> None:
    """From step 4 of another strategy's run on, this one ends as if it had run alone.

    A reader is tested with each shape of a checkpoint: one file, shards, shards of stages; one
    device reads those of all.
    """
    begun = plain(runs, source)
    run = runs(*PLACES[name], *METRICS, f"ckpt_path={begun.checkpoint(4)}")
    truth = plain(runs, "single")
    check_close(run.column("train/loss"), truth.column("train/loss")[4:])
    check_close(run.column("val/loss"), truth.column("val/loss")[1:])
    check_weights(run, truth)


def check_starts_from_weights_of(runs: Runs, name: str, source: str) -> None:
    """init_from another strategy's run: the first step is that of one process that does so."""
    begun = plain(runs, source)
    words = (f"init_from={begun.folder}", "seed=7", "data.train.seed=3", "trainer.max_steps=1")
    run, truth = runs(*PLACES[name], *words), runs(*PLACES["single"], *words)
    check_same_run(run, truth)
    fresh = plain(runs, "single").column("train/loss")[0]
    assert abs(truth.column("train/loss")[0] / fresh - 1) > 1e-3  # not by chance


def check_muon(runs: Runs, name: str) -> None:
    """Muon, which needs whole matrices, equals one process where ranks divide its work."""
    words = (
        "optimizer=muon", "+callbacks.fp32._target_=own_parts.MuonInFp32", "trainer.max_steps=4",
        "optimizer.momentum=0.9", "optimizer.betas=[0.8,0.9]", "optimizer.embedding_lr=2e-3",
        "optimizer.head_lr=5e-3", "optimizer.vector_lr=5e-4",
    )  # fmt: skip
    truth = runs(*PLACES["single"], *words)
    check_same_run(runs(*PLACES[name], *words), truth)
    groups = truth.state(4)["optimizer_states"][0]["param_groups"]
    assert {group["momentum"] for group in groups if group["use_muon"]} == {0.9}
    assert {tuple(group["betas"]) for group in groups if not group["use_muon"]} == {(0.8, 0.9)}


class Claims:
    """Tests of every strategy; a file's own class gives the name.

    Attributes:
        data_ranks: of each rank.
    """

    name: str
    data_ranks: list[int]

    def test_it_equals_one_process(self, runs):
        """Losses, norms, metrics, validations and final weights of all steps."""
        n_steps = STEPS.get(self.name, N_STEPS)
        run, truth = plain(runs, self.name), plain(runs, "single")
        assert run.n_steps == len(run.column("train/loss")) == n_steps
        check_same_run(run, truth)
        n_validations = n_steps // 4
        accuracy = truth.column("val/accuracy")[:n_validations]
        assert len(accuracy) == n_validations and min(accuracy) > 0
        assert run.column("val/accuracy") == pytest.approx(accuracy)  # counts of predictions
        assert run.column("val/counted") == truth.column("val/counted")[:n_validations]

    def test_ranks_read_the_samples_of_their_data_rank(self, runs):
        """Together those of one process in every step, and as they are named."""
        n_steps, run = STEPS.get(self.name, N_STEPS), plain(runs, self.name)
        seen = [run.record(rank) for rank in range(len(self.data_ranks))]
        dataset = Ragged(num_samples=200, seq_len=15, vocab_size=61, seed=3)
        for rank, one in enumerate(seen):
            named = [dataset[sample][0] for step in one["samples"] for sample in step]
            assert torch.equal(torch.stack(named), torch.cat(one["tokens"])), f"rank {rank}"
            assert one["samples"] == seen[self.data_ranks.index(self.data_ranks[rank])]["samples"]
            assert len(one["samples"]) == n_steps
        first_of = [self.data_ranks.index(number) for number in sorted(set(self.data_ranks))]
        for step, alone in enumerate(plain(runs, "single").record()["samples"][:n_steps]):
            together = [sample for rank in first_of for sample in seen[rank]["samples"][step]]
            assert sorted(together) == sorted(alone), f"step {step}"
            assert len(set(together)) == 16  # no sample twice


class GoesOn(Claims):
    """And of one strategy for each way to partition a net."""

    def test_a_run_with_dropout_goes_on_bit_for_bit(self, runs):
        """From a checkpoint to the same bits, of which each rank draws its own."""
        words = (*PLACES[self.name], *DROPOUT)
        whole = runs(*words)
        resumed = runs(*words, f"ckpt_path={whole.checkpoint(3)}")
        check_same_bits(resumed, whole, since=3)
        masks = [whole.record(rank)["mask"].tolist()[:200] for rank in range(len(self.data_ranks))]
        for rank, mask in enumerate(masks):
            assert any(mask)
            assert mask not in masks[:rank], f"rank {rank}"


class FewRanks(GoesOn):
    """And of those that need no four processes."""

    def test_bf16_multiplies_in_bf16(self, runs):
        """bf16-mixed multiplies in bf16, and trains what fp32 trains but for 8 bits of mantissa."""
        words = ("trainer.precision=bf16-mixed", "trainer.max_steps=2")
        run, truth = runs(*PLACES[self.name], *words), plain(runs, "single")
        assert truth.record()["dtype"] == "torch.float32"
        assert run.record()["dtype"] == "torch.bfloat16"
        losses, expected = run.column("train/loss"), truth.column("train/loss")[:2]
        check_close(losses, expected, 1e-2)
        check_close(run.column("grad_norm"), truth.column("grad_norm")[:2], 5e-2)
        assert losses != expected
        assert run.record()["peak_of"] == "measured, bfloat16"  # what perf/mfu is measured against


class Recomputes(FewRanks):
    """And of one strategy for each of the functions that make a net ready."""

    def test_activation_checkpointing_keeps_less(self, runs):
        """Activation checkpointing changes no loss; it keeps less, and full multiplies again."""
        truth = plain(runs, self.name)
        made = {"none": truth}
        for mode in ("selective", "full"):
            words = (f"model.activation_checkpointing={mode}", "trainer.max_steps=2")
            made[mode] = runs(*PLACES[self.name], *words)
            check_close(made[mode].column("train/loss"), truth.column("train/loss")[:2])
        kept = {mode: sum(run.record()["saved_bytes"]) for mode, run in made.items()}
        products = {mode: sum(run.record()["products"]) for mode, run in made.items()}
        assert kept["none"] > 2 * kept["selective"] > 0
        assert kept["none"] > 2 * kept["full"] > 0
        assert products["none"] == products["selective"] < products["full"]


def shared_folder(tmp_path_factory) -> Path:
    """One folder for all processes of this test suite."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    (folder / "runs").mkdir(exist_ok=True)
    return folder / "runs"
