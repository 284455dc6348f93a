"""TextDataModule: training and evaluation batches for this rank, in an order that can resume."""

import atexit
import errno
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from gptrain.core.lengths import RunLengths
from gptrain.core.small_files import DataError
from gptrain.data import BatchReader, EvalBatches, Mixture, SampleOrder, TrainBatches, collate
from gptrain.data.mixture import MixtureOrder
from gptrain.data.samples import count_batch_targets, len_of
from gptrain.runtime.signals import block_stop_signals, ignore_in_worker, kill_workers

SHARED_MEMORY = "/dev/shm"  # by which batches of a worker reach the training process


class TextDataModule(pl.LightningDataModule):
    """Serves any data set; one of `(tokens (T,), targets (T,))` to a LanguageModel.

    The order of training is a pure function of (seed, micro-batch number of the run), so that a
    resumed run goes on at the very next sample.

    Args:
        train, val: datasets; `test` defaults to `val`.
        lengths: of the run.
        rank, world_size: place among the ranks that see different samples.
        ranks_per_sample: neighbouring ranks that see the same ones, of a tensor group.
        equal_lengths: Which of "train", "val" and "test" hold pairs of token sequences that all
            must have one length, because LanguageModel's own step reads them.
        num_workers: processes that load batches; 0 loads in the training process.
        pin_memory: page-locked batches, for faster copies to a GPU.
    """

    def __init__(
        self,
        train: Dataset,
        val: Dataset,
        test: Dataset | None,
        lengths: RunLengths,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        ranks_per_sample: int = 1,
        equal_lengths: Collection[str] = (),
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        super().__init__()
        self.train, self.val, self.test = train, val, test if test is not None else val
        self.batch_size, self.rank, self.world_size = lengths.batch.batch_size, rank, world_size
        self.epoch_steps, self.validate_every = lengths.epoch_steps, lengths.validate_every
        self.ranks_per_sample, self.equal_lengths = ranks_per_sample, equal_lengths
        self.num_workers, self.pin_memory, self.worker_seed = num_workers, pin_memory, seed + rank
        self.accumulate = accumulate = lengths.batch.accumulate
        is_mixture = isinstance(train, Mixture)
        order = train.order(seed) if is_mixture else SampleOrder(len_of(train), seed)
        self.batches = TrainBatches(
            order,
            self.batch_size,
            accumulate,
            rank,
            world_size,
            epoch_steps=lengths.epoch_steps,
            position=lambda: self.step * accumulate,
        )
        self.step_tokens = lengths.step_tokens
        self._tokens_at = (0, 0)  # a step, and tokens by it

    @property
    def step(self) -> int:
        """Optimizer steps that the run has done."""
        return cast(pl.Trainer, self.trainer).global_step

    @property
    def tokens(self) -> int:
        """Positions that the run has trained on, over all ranks, in steps of whatever size."""
        step, tokens = self._tokens_at
        return tokens + (self.step - step) * self.step_tokens

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, for one that goes on with another batch or other weights."""
        step, order = self.step, self.batches.order
        place = list(self.batches.place(step))
        taken = order.taken(*place) if isinstance(order, MixtureOrder) else None
        return {"step": step, "place": place, "taken": taken, "tokens": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there; an evaluation does not."""
        if cast(pl.Trainer, self.trainer).state.fn == "fit":
            step, place = state_dict["step"], state_dict["place"]
            self.batches.begin = (step, *place)
            self._tokens_at = (step, state_dict["tokens"])
            if isinstance(self.batches.order, MixtureOrder):
                self.batches.order.go_on(*place, state_dict["taken"])

    def train_dataloader(self) -> DataLoader:
        loader = self._loader(self.train, "data.train", self.batches)
        loader.read_ahead = self.accumulate
        return loader

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.val, "data.val")

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader(self.test, "data.test")

    def step_samples(self, step: int, rank: int | None = None) -> list[int]:
        """The samples of one optimizer step, of all ranks or of one rank of the job."""
        samples = self.batches.step_samples(step)  # (accumulate, ranks, batch)
        if rank is not None:
            samples = samples[:, rank // self.ranks_per_sample % self.world_size]
        return samples.ravel().tolist()

    def part_of(self, batch_idx: int) -> str | None:
        """Of a mixture that is evaluated: the part that a batch is of."""
        return self.eval_parts[self.eval_batches.part_of(batch_idx)] if self.eval_parts else None

    def _evaluation_loader(self, dataset: Dataset, name: str) -> DataLoader:
        parts = dataset.parts if isinstance(dataset, Mixture) else {}
        lengths = [len_of(one) for one in parts.values() or [dataset]]
        self.eval_parts = list(parts)
        self.eval_batches = EvalBatches(lengths, self.batch_size, self.rank, self.world_size)
        return self._loader(dataset, name, self.eval_batches)

    def _loader(self, dataset: Dataset, name: str, batches: Iterable[list[int]]) -> "Loader":
        forks = self.num_workers > 0 and sys.platform == "linux"  # Python 3.14's default does not
        is_checked = name.removeprefix("data.") in self.equal_lengths
        n_positions = len(dataset[0][0]) if is_checked else None
        return Loader(
            BatchReader(dataset, name, n_positions),
            batch_sampler=batches,
            # Its own, from which workers are seeded: the run's random numbers are left alone.
            generator=torch.Generator().manual_seed(self.worker_seed),
            collate_fn=collate_and_share if self.num_workers else collate,
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
        read_ahead: batches that are loaded at once: the micro-batches of a step.
        step_targets: Targets that count in each step, or batch of an evaluation, that was loaded
            and not yet taken from here; None where a batch has no known targets.
    """

    waited_s, read_ahead = 0.0, 1
    step_targets: Sequence[int | None] = ()

    # A generator around torch's iterator.
    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        with block_stop_signals():
            batches = super().__iter__()
        atexit.unregister(kill_workers)  # once
        atexit.register(kill_workers)
        self.step_targets = []
        start_s = time.perf_counter()
        try:
            while step := list(islice(batches, self.read_ahead)):
                self.waited_s += time.perf_counter() - start_s
                counts = [count_batch_targets(batch) for batch in step]
                known = [count for count in counts if count is not None]
                self.step_targets.append(sum(known) if len(known) == len(counts) else None)
                yield from step
                start_s = time.perf_counter()
        except DataError as error:  # from a worker the message comes behind its traceback
            raise DataError(str(error).rpartition("DataError: ")[2].strip()) from None
        except RuntimeError as error:
            if "No space left" not in str(error):
                raise
            message = "full: no room for the batches of data.num_workers; docker has --shm-size"
            raise OSError(errno.ENOSPC, message, SHARED_MEMORY) from None


def collate_and_share(batch: Any) -> Any:
    """`collate` in a worker. Where shared memory is full this raises.

    The thread of a worker that sends its batches would print the error and send nothing, and the
    training process would wait for ever.
    """
    batch = collate(batch)
    for tensor in tensors_in(batch):
        tensor.share_memory_()
    return batch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a batch, in whatever lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
