"""TextDataModule: training and evaluation batches for this rank, in an order that can resume."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from gptrain.data import EvalBatches, PaddedDataset, SampleOrder, TrainBatches, collate
from gptrain.lengths import Lengths
from gptrain.resilience.signals import hold_back, ignore_in_worker


class TextDataModule(pl.LightningDataModule):
    """Serves any dataset; those of `(tokens (T,), targets (T,))` to a LanguageModel.

    The order of training is a pure function of (seed, micro-batch number of the run), so that a
    resumed run goes on at the very next sample.

    Args:
        train, val: datasets; `test` defaults to `val`.
        lengths: of the run.
        rank, world_size: place among the ranks that see different samples.
        ranks_per_sample: neighbouring ranks that see the same ones, of a tensor group.
        num_workers: processes that load batches; 0 loads in the training process.
        pin_memory: page-locked batches, for faster copies to a GPU.
    """

    def __init__(
        self,
        train: Dataset,
        val: Dataset,
        test: Dataset | None,
        lengths: Lengths,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        ranks_per_sample: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        super().__init__()
        self.train, self.val, self.test = train, val, test if test is not None else val
        self.batch_size, self.rank, self.world_size = lengths.batch.batch_size, rank, world_size
        self.epoch_steps, self.validate_every = lengths.epoch_steps, lengths.validate_every
        self.ranks_per_sample = ranks_per_sample
        self.num_workers, self.pin_memory, self.worker_seed = num_workers, pin_memory, seed + rank
        accumulate = lengths.batch.accumulate
        self.batches = TrainBatches(
            SampleOrder(len(train), seed),
            self.batch_size,
            accumulate,
            rank,
            world_size,
            epoch_steps=lengths.epoch_steps,
            position=lambda: self.trainer.global_step * accumulate,
        )
        self.train_loader: Loader | None = None

    @property
    def waited_s(self) -> float:
        """Of the batches of training so far."""
        return 0.0 if self.train_loader is None else self.train_loader.waited_s

    def train_dataloader(self) -> DataLoader:
        self.train_loader = self._loader(self.train, self.batches)
        return self.train_loader

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.val)

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.test)

    def step_samples(self, step: int, rank: int | None = None) -> list[int]:
        """The samples of one optimizer step, of all ranks or of one rank of the job."""
        samples = self.batches.step_samples(step)  # (accumulate, ranks, batch)
        if rank is not None:
            samples = samples[:, rank // self.ranks_per_sample % self.world_size]
        return samples.ravel().tolist()

    def _evaluation_loader(self, dataset: Dataset) -> DataLoader:
        batches = EvalBatches(len(dataset), self.batch_size, self.rank, self.world_size)
        return self._loader(PaddedDataset(dataset), batches)

    def _loader(self, dataset: Dataset, batches: Iterable[list[int]]) -> "Loader":
        forks = self.num_workers > 0 and sys.platform == "linux"  # Python 3.14's default does not
        return Loader(
            dataset,
            batch_sampler=batches,
            # Its own, from which workers are seeded: the run's random numbers are left alone.
            generator=torch.Generator().manual_seed(self.worker_seed),
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=partial(ignore_in_worker, os.getpid()) if self.num_workers else None,
            multiprocessing_context="fork" if forks else None,
        )


class Loader(DataLoader):
    """A DataLoader whose workers start with stop signals blocked, and which times its batches.

    Attributes:
        waited_s: seconds in which training has waited for a batch; a GPU may have been busy.
    """

    waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        with hold_back():
            batches = super().__iter__()
        start_s = time.perf_counter()
        for batch in batches:
            self.waited_s += time.perf_counter() - start_s
            yield batch
            start_s = time.perf_counter()
