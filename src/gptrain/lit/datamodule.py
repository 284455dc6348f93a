"""TextDataModule: training and evaluation batches for this rank, in an order that can resume."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from gptrain.data import EvalBatches, PaddedDataset, SampleOrder, TrainBatches, collate
from gptrain.resilience.signals import hold_back, ignore_in_worker


class TextDataModule(pl.LightningDataModule):
    """Serves any dataset of `(tokens (T,), targets (T,))`.

    The training loader is one long pass over the whole run: its order is a pure function of
    (seed, micro-batch number), so a resumed run goes on at the very next sample.

    Args:
        train, val: datasets; `test` defaults to `val`.
        batch_size: sequences per device per micro-step.
        accumulate: micro-steps per optimizer step.
        n_steps: optimizer steps of the run; None where only time ends it.
        rank, world_size: place among the ranks that see different samples.
        ranks_per_sample: neighbouring ranks that see the same ones, of a tensor group.
        num_workers: processes that load batches; 0 loads in the training process.
        pin_memory: page-locked batches, for faster copies to a GPU.
    """

    def __init__(
        self,
        train: Dataset,
        val: Dataset,
        test: Dataset | None = None,
        *,
        batch_size: int,
        accumulate: int = 1,
        n_steps: int | None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ranks_per_sample: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        super().__init__()
        self.train, self.val, self.test = train, val, test if test is not None else val
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.ranks_per_sample = ranks_per_sample
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.batches = TrainBatches(
            SampleOrder(len(train), seed), batch_size, accumulate, rank, world_size, n_steps
        )

    def train_dataloader(self) -> DataLoader:
        self.batches.start = self._position()
        return self._loader(self.train, self.batches)

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

    def _position(self) -> int:
        """Micro-batches that the run has taken, also right after a resume."""
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def _evaluation_loader(self, dataset: Dataset) -> DataLoader:
        batches = EvalBatches(len(dataset), self.batch_size, self.rank, self.world_size)
        return self._loader(PaddedDataset(dataset), batches)

    def _loader(self, dataset: Dataset, batches: Iterable[list[int]]) -> DataLoader:
        forks = self.num_workers > 0 and sys.platform == "linux"  # Python 3.14's default does not
        return Loader(
            dataset,
            batch_sampler=batches,
            generator=torch.Generator(),  # its own: the loader's seeds leave the run's RNG alone
            collate_fn=collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.num_workers > 0,
            worker_init_fn=partial(ignore_in_worker, os.getpid()) if self.num_workers else None,
            multiprocessing_context="fork" if forks else None,
        )


class Loader(DataLoader):
    """Whose workers no signal ends before they have said that they ignore it."""

    def _get_iterator(self) -> Iterator:
        with hold_back():
            return super()._get_iterator()
