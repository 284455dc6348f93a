"""Complete runs of train.py. Each run is made once and read by all tests that need it.

    run = runs("strategy=fsdp", "trainer.devices=2")
    run.losses(), run.record(rank=1), run.weights()

A run is identified by its overrides. The first test that needs a run makes it, in any process of
the test suite, and the other processes wait. So every test can run alone (-k). The ranks are forked
(tests/forked.py); otherwise a run is what a user starts. `own_parts.Record` records each rank.
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

import pytest
import torch
import torch.distributed as dist

from gptrain.checkpoints.amendment import load_state
from tests.run import read_shards
from tests.truth.own import Ragged

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "strategies")]

RTOL, WEIGHT_RTOL = 1e-5, 1e-4  # fp32 sums in another order differ by 1e-6; Adam divides by them
# Softmax ignores a bias on the keys. Its gradient is rounding noise, which Adam amplifies.
NOISE = "k_proj.bias"
N_STEPS, MAX_NORM = 8, 0.5

# V = 61 and T = 15 are not multiples of two ranks. One process takes two micro-steps of eight
# sequences per step. Ranks take micro-steps of four, with different numbers of valid targets.
MODEL = (
    "model=gpt_nano", "model.vocab_size=61", "model.d_model=32", "model.n_heads=4",
    "model.n_layers=4", "model.max_seq_len=16",
)  # fmt: skip
DATA = (
    "data.train._target_=tests.truth.own.Ragged", "data.train.num_samples=200", "data.train.seed=3",
    "data.val._target_=tests.truth.own.Ragged", "data.val.num_samples=21", "data.val.seed=4",
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
    "context_parallel": ("strategy=context_parallel", "trainer.devices=2"),
    "pipeline": ("strategy=pipeline", "trainer.devices=2"),
    "fsdp_tensor_parallel": ("strategy=fsdp_tensor_parallel", "trainer.devices=4"),
    "ddp_pipeline": ("strategy=ddp_pipeline", "trainer.devices=4"),
    "hsdp": ("strategy=fsdp", "strategy.replicas=2", "trainer.devices=4"),
}
# Four processes on two cores are slow, so these runs take fewer steps.
STEPS = {"fsdp_tensor_parallel": 4, "ddp_pipeline": 4, "hsdp": 4}
# Runs that are compared bit by bit have half as many blocks.
DROPOUT = (
    "model.dropout=0.1", "model.n_layers=2", "trainer.max_steps=6", "trainer.val_check_interval=3",
)  # fmt: skip


@dataclass
class Run:
    """A finished run.

    Attributes:
        output: Everything that its processes printed.
    """

    folder: Path
    code: int
    output: str

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Rows of metrics.csv, one per logged step."""
        with open(self.folder / "metrics.csv", newline="") as file:
            return list(csv.DictReader(file))

    def column(self, name: str) -> list[float]:
        """Return the values of one column, without the steps that do not have it."""
        return [float(row[name]) for row in self.rows if row.get(name)]

    def record(self, rank: int = 0) -> dict:
        """Return what `own_parts.Record` recorded in one rank."""
        return torch.load(self.folder / f"record-{rank}.pt", weights_only=True)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of one checkpoint."""
        return self.folder / "checkpoints" / f"step-{step:08d}"

    def state(self, step: int) -> dict:
        """Return all values of a checkpoint, from its file and from the ranks' shards."""
        path = self.checkpoint(step)
        state = load_state(path)
        if (path / ".metadata").exists():
            state["shards"] = read_shards(path)
        return state

    @property
    def n_steps(self) -> int:
        """Number of steps that the run has taken."""
        return int(self.column("step")[-1])

    def weights(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Return the net's full weights after a step, or at the end of the run."""
        import gptrain

        with torch.no_grad():
            net = gptrain.load(self.checkpoint(step or self.n_steps), allowed_targets=["own_parts"])
            return net.state_dict()


class Runs:
    """A cache of runs.

    Args:
        folder: Folder that all processes of the test suite share.
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
        """Return the run with WORDS and the given overrides.

        Args:
            words: Overrides of the command.
            model: Overrides of the model group.
            data: Overrides of the data group.
            code: Exit code that the run must have.
            begun: Run to resume in a copy of its folder.
        """
        words = (*WORDS, *model, *data, *words)
        key = json.dumps([words, begun and begun.folder.name])
        if key not in self.made:
            self.made[key] = self._find_or_make(key, words, begun)
        run = self.made[key]
        if run.code != code:
            pytest.fail(f"exit code {run.code}, not {code}:\n{run.output}", pytrace=False)
        return run

    def _find_or_make(self, key: str, words: tuple[str, ...], begun: Run | None) -> Run:
        name = hashlib.sha1(key.encode()).hexdigest()[:12]
        folder, end = self.folder / name, self.folder / f"{name}.json"
        output = self.folder / f"{name}.txt"
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not end.exists():
                shutil.rmtree(folder, ignore_errors=True)
                if begun is not None:
                    shutil.copytree(begun.folder, folder)
                code = run_train([*words, f"run_dir={folder}"], output)
                end.write_text(json.dumps(code))
        return Run(folder, json.loads(end.read_text()), output.read_text(errors="replace"))


def run_train(words: list[str], output: Path) -> int:
    """Run `python train.py <words>` in this process and forked ranks; return the exit code."""
    from forked import forked_ranks

    import train
    from gptrain.config import cli

    with open(output, "a", buffering=1) as file:
        print("python train.py", *words, file=file)
        with redirect_stdout(file), redirect_stderr(file), forked_ranks(output, output):
            try:
                return cli.run_command(train.main, words)
            finally:
                if dist.is_initialized():  # a group with this process only
                    dist.destroy_process_group()


def check_close(values: list[float], expected: list[float], rtol: float = RTOL) -> None:
    """Check that two columns are equal up to rounding."""
    assert len(values) == len(expected) > 0, (values, expected)
    for a, b in zip(values, expected, strict=True):
        assert abs(a / b - 1) < rtol, (values, expected)


def check_weights(run: Run, truth: Run) -> None:
    """Check that the weights at the run's end are equal up to rounding."""
    weights, expected = run.weights(), truth.weights(run.n_steps)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        if NOISE not in name:
            error = ((weights[name] - weight).abs().max() / weight.abs().max()).item()
            assert error < WEIGHT_RTOL, (name, error)


def check_losses(run: Run, truth: Run, rtol: float = RTOL) -> None:
    """Check losses, unclipped gradient norms and validations against the reference run."""
    for name in ("train/loss", "grad_norm", "val/loss"):
        losses = run.column(name)
        check_close(losses, truth.column(name)[: len(losses)], rtol)


def check_same_run(run: Run, truth: Run) -> None:
    """Check losses and final weights against the reference, and that gradients were clipped."""
    check_losses(run, truth)
    assert min(run.column("grad_norm")) > MAX_NORM
    check_weights(run, truth)


# Checks that hold for every strategy


def plain(runs: Runs, name: str) -> Run:
    """Return a strategy's run of eight steps (combined strategies: four) without dropout."""
    n_steps = STEPS.get(name, N_STEPS)
    return runs(*PLACES[name], *METRICS, f"trainer.max_steps={n_steps}")


def check_starts_from_weights_of(runs: Runs, name: str, source: str) -> None:
    """Check that the first step after init_from another strategy's run equals one process."""
    begun = plain(runs, source)
    words = (f"init_from={begun.folder}", "seed=7", "data.train.seed=3", "trainer.max_steps=1")
    run, truth = runs(*PLACES[name], *words), runs(*PLACES["single"], *words)
    check_same_run(run, truth)
    fresh = plain(runs, "single").column("train/loss")[0]
    assert abs(truth.column("train/loss")[0] / fresh - 1) > 1e-3  # the initial weights matter


def check_draws_own_dropout(runs: Runs, name: str, n_ranks: int) -> None:
    """Check that each rank draws its own dropout masks."""
    whole = runs(*PLACES[name], *DROPOUT)
    masks = [whole.record(rank)["mask"].tolist()[:200] for rank in range(n_ranks)]
    for rank, mask in enumerate(masks):
        assert any(mask)
        assert mask not in masks[:rank], f"rank {rank}"


def check_muon(runs: Runs, name: str) -> None:
    """Check that Muon, whose work the ranks divide, equals one process."""
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


class StrategyTests:
    """Tests of every strategy. A subclass names the strategy.

    Attributes:
        data_ranks: Data rank of each rank.
    """

    name: str
    data_ranks: list[int]

    def test_training_equals_one_process(self, runs):
        """Compare losses, norms, metrics and validations of all steps, and the final weights."""
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
        """The ranks together read one process's samples in every step, and record their indices."""
        n_steps, run = STEPS.get(self.name, N_STEPS), plain(runs, self.name)
        seen = [run.record(rank) for rank in range(len(self.data_ranks))]
        dataset = Ragged(num_samples=200, seq_len=15, vocab_size=61, seed=3)
        for rank, record in enumerate(seen):
            named = [dataset[sample][0] for step in record["samples"] for sample in step]
            assert torch.equal(torch.stack(named), torch.cat(record["tokens"])), f"rank {rank}"
            assert (
                record["samples"] == seen[self.data_ranks.index(self.data_ranks[rank])]["samples"]
            )
            assert len(record["samples"]) == n_steps
        first_of = [self.data_ranks.index(number) for number in sorted(set(self.data_ranks))]
        for step, alone in enumerate(plain(runs, "single").record()["samples"][:n_steps]):
            together = [sample for rank in first_of for sample in seen[rank]["samples"][step]]
            assert sorted(together) == sorted(alone), f"step {step}"
            assert len(set(together)) == 16  # no sample is read twice


class DropoutTests(StrategyTests):
    """Further tests, for one strategy per way to partition a net."""

    def test_each_rank_draws_its_own_dropout(self, runs):
        check_draws_own_dropout(runs, self.name, len(self.data_ranks))


class PrecisionTests(DropoutTests):
    """Further tests, for strategies that need fewer than four processes."""

    def test_bf16_mixed_multiplies_in_bf16(self, runs):
        """bf16-mixed multiplies in bf16 and equals fp32 up to 8 bits of mantissa."""
        words = ("trainer.precision=bf16-mixed", "trainer.max_steps=2")
        run, truth = runs(*PLACES[self.name], *words), plain(runs, "single")
        assert truth.record()["dtype"] == "torch.float32"
        assert run.record()["dtype"] == "torch.bfloat16"
        losses, expected = run.column("train/loss"), truth.column("train/loss")[:2]
        check_close(losses, expected, 1e-2)
        check_close(run.column("grad_norm"), truth.column("grad_norm")[:2], 5e-2)
        assert losses != expected
        # perf/mfu is relative to this peak.
        assert run.record()["peak_of"] == "measured, bfloat16"


class CheckpointingTests(PrecisionTests):
    """Further tests, for one strategy per function that prepares a net."""

    def test_activation_checkpointing_saves_fewer_activations(self, runs):
        """Activation checkpointing keeps the loss and saves less; `full` recomputes matmuls."""
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
    """Return one folder for all processes of this test suite."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent
    (folder / "runs").mkdir(exist_ok=True)
    return folder / "runs"
