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

import pytest
import torch
import torch.distributed as dist
from own_parts import Ragged

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
# A run that is stopped, which has half of the blocks: three of them are compared bit by bit.
DROPOUT = ("model.dropout=0.1", "model.n_layers=2", "trainer.max_steps=5")


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
        state = torch.load(path / "state.ckpt", weights_only=True)
        if (path / ".metadata").exists():
            state["shards"] = read_shards(path)
        return state

    def weights(self) -> dict[str, torch.Tensor]:
        """The net's at the end of the run, whole."""
        import gptrain

        with torch.no_grad():
            return gptrain.load(self.folder, "last", allowed_targets=["own_parts"]).state_dict()


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
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return state


def differences(mine: object, theirs: object, place: str = "") -> list[str]:
    """Where two states differ, bit by bit."""
    if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return [] if torch.equal(mine, theirs) else [place]
    if isinstance(mine, dict) and isinstance(theirs, dict):
        lone = [f"{place}.{key}: in one alone" for key in mine.keys() ^ theirs.keys()]
        return lone + [
            found
            for key in mine.keys() & theirs.keys()
            for found in differences(mine[key], theirs[key], f"{place}.{key}")
        ]
    if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [f"{place}: {len(mine)} and {len(theirs)}"]
        return [
            found
            for index, pair in enumerate(zip(mine, theirs, strict=True))
            for found in differences(*pair, f"{place}[{index}]")
        ]
    return [] if mine == theirs else [f"{place}: {mine} and {theirs}"]


def check_close(mine: list[float], expected: list[float], rtol: float = RTOL) -> None:
    """Two columns are the same but for rounding."""
    assert len(mine) == len(expected) > 0, (mine, expected)
    for a, b in zip(mine, expected, strict=True):
        assert abs(a / b - 1) < rtol, (mine, expected)


def check_weights(run: Run, truth: Run) -> None:
    """Final weights are the same but for rounding."""
    mine, expected = run.weights(), truth.weights()
    assert mine.keys() == expected.keys()
    for name, weight in expected.items():
        if NOISE not in name:
            error = ((mine[name] - weight).abs().max() / weight.abs().max()).item()
            assert error < WEIGHT_RTOL, (name, error)


def check_same_run(run: Run, truth: Run) -> None:
    """Losses, norms before clipping, validations and final weights are those of the truth."""
    check_close(run.column("train/loss"), truth.column("train/loss"))
    check_close(run.column("grad_norm"), truth.column("grad_norm"))
    assert min(run.column("grad_norm")) > MAX_NORM  # clipping is active
    check_close(run.column("val/loss"), truth.column("val/loss"))
    check_weights(run, truth)


# The claims that hold for every strategy, by its name


def plain(runs: Runs, name: str, n_steps: int | None = None) -> Run:
    """Eight steps, of a mix four, with metrics, without dropout; two micro-steps a pair."""
    n_steps = n_steps or STEPS.get(name, N_STEPS)
    fewer = (f"trainer.max_steps={n_steps}",) if n_steps < N_STEPS else ()
    return runs(*PLACES[name], *METRICS, *fewer)


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
    check_close(run.column("train/loss"), truth.column("train/loss"))
    check_close(run.column("grad_norm"), truth.column("grad_norm"))
    check_weights(run, truth)
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
        run, truth = plain(runs, self.name), plain(runs, "single", n_steps)
        assert len(run.column("train/loss")) == n_steps
        check_same_run(run, truth)
        accuracy = truth.column("val/accuracy")
        assert len(accuracy) == n_steps / 4 and min(accuracy) > 0
        assert run.column("val/accuracy") == pytest.approx(accuracy)  # counts of predictions
        assert run.column("val/counted") == truth.column("val/counted")

    def test_a_stopped_run_with_dropout_goes_on_bit_for_bit(self, runs):
        """Asked to stop after step 3 and started again, a run ends in the same bits."""
        words = (*PLACES[self.name], *DROPOUT)
        whole = runs(*words)
        stopped = runs(
            *words,
            "+callbacks.stop._target_=own_parts.StopAt", "+callbacks.stop.step=3",
            f"+callbacks.stop.rank={len(self.data_ranks) - 1}",
            code=75,
        )  # fmt: skip
        assert stopped.column("step")[-1] < 5
        resumed = runs(*words, "ckpt_path=last", begun=stopped)
        assert resumed.record()["places"][0][1] == stopped.column("step")[-1]
        assert not differences(resumed.state(5), whole.state(5))
        for column in ("step", "train/loss", "lr", "grad_norm", "val/loss"):
            assert resumed.column(column) == whole.column(column), column

    def test_ranks_read_the_samples_of_their_data_rank(self, runs):
        """Together those of one process in every step."""
        data_ranks = self.data_ranks
        n_steps, run = STEPS.get(self.name, N_STEPS), plain(runs, self.name)
        truth = plain(runs, "single", n_steps).record()["tokens"]
        read = [run.record(rank)["tokens"] for rank in range(len(data_ranks))]
        n_data = max(data_ranks) + 1
        first_of = [data_ranks.index(number) for number in range(n_data)]
        for rank, number in enumerate(data_ranks):
            assert not differences(read[rank], read[first_of[number]]), f"rank {rank}"

        def of_step(micro_steps, step):
            n_micro = len(micro_steps) // n_steps
            return micro_steps[step * n_micro : (step + 1) * n_micro]

        for rank, tokens in enumerate(read):  # what an error would name
            named = run.record(rank)["samples"]
            assert len(named) == n_steps
            dataset = Ragged(num_samples=200, seq_len=15, vocab_size=61, seed=3)
            told = [dataset[sample][0] for step in named for sample in step]
            assert torch.equal(torch.stack(told), torch.cat(tokens)), f"rank {rank}"
        for step in range(n_steps):
            together = torch.cat(
                [part for first in first_of for part in of_step(read[first], step)]
            )
            alone = torch.cat(of_step(truth, step))
            assert sorted(together.tolist()) == sorted(alone.tolist()), f"step {step}"
            assert len(together.unique(dim=0)) == 16  # no sample twice

    def test_each_rank_draws_dropout_of_its_own(self, runs):
        run = runs(*PLACES[self.name], *DROPOUT)
        masks = [run.record(rank)["mask"].tolist()[:200] for rank in range(len(self.data_ranks))]
        for rank, mask in enumerate(masks):
            assert any(mask)
            assert mask not in masks[:rank], f"rank {rank}"


class FewRanks(Claims):
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
        kept, products = {}, {}
        for mode in ("none", "selective", "full"):
            words = (f"model.activation_checkpointing={mode}", "trainer.max_steps=2")
            run = runs(*PLACES[self.name], *words)
            check_close(run.column("train/loss"), plain(runs, "single").column("train/loss")[:2])
            seen = run.record()
            kept[mode], products[mode] = sum(seen["saved_bytes"]), sum(seen["products"])
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
