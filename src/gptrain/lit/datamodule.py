"""TextDataModule: the training and evaluation batches of one rank, in an order that can resume."""

import atexit
import signal
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from gptrain.core.errors import ConfigError
from gptrain.core.lengths import RunLengths
from gptrain.data import BatchReader, EvalBatches, Mixture, SampleOrder, TrainBatches, collate
from gptrain.data.samples import find_targets
from gptrain.data.stream import StreamDataset
from gptrain.loss import IGNORED
from gptrain.parallel.mesh import gather
from gptrain.runtime.signals import SIGNALS, ignore_in_worker, kill_workers


@dataclass(eq=False)
class TextDataModule(pl.LightningDataModule):
    """LightningDataModule that serves the batches of this rank from any datasets.

    A LanguageModel needs samples `(tokens (T,), targets (T,))`; a user's own module may read other
    samples. The training order is a pure function of the seed and the number of the micro-batch in
    the run, so that a resumed run continues with the next sample. A dataset that wraps a stream is
    read in the order of the stream instead, and its position is saved with each checkpoint.

    Attributes:
        train: Training dataset.
        val: Validation dataset.
        test: Test dataset. None uses `val`.
        lengths: Lengths of the run: its batches, its steps and the steps of an epoch.
        seed: Seed of the training order and, with the rank, of the data workers.
        rank: Index of this rank among the `world_size` data ranks, which read different samples.
        world_size: Number of data ranks.
        equal_lengths: Names of the datasets ("train", "val", "test") whose samples must all have as
            many positions as the first one, because a step of LanguageModel itself reads them.
        vocab_size: Number of token ids V of the net. In the datasets in `equal_lengths`, a token
            outside of 0 to V - 1, or a target that is neither in this range nor -100, raises a
            DataError. None does not check.
        num_workers: Number of processes per data loader. A training stream is read by one process.
        pin_memory: True lets the loaders copy batches to pinned memory, as in DataLoader.
        limits: Number of batches of "val" and of "test" that all ranks together evaluate, or their
            fraction. None or no entry is the full set.
        batch_size: Samples of a batch of one rank. Lightning's BatchSizeFinder looks for this name,
            before gptrain refuses it.
        positions: Pairs of an optimizer step and the position of this rank's part of a training
            stream after it, of the last steps that were loaded.

    Raises:
        DataError: If one step needs more samples than `train` has.
    """

    train: Any
    val: Any
    test: Any
    lengths: RunLengths
    _: KW_ONLY
    seed: int
    rank: int = 0
    world_size: int = 1
    equal_lengths: Collection[str] = ()
    vocab_size: int | None = None
    num_workers: int = 0
    pin_memory: bool = False
    limits: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.batch_size = self.lengths.batch.batch_size
        self._accumulate = self.lengths.batch.accumulate
        train, seed = self.train, self.seed
        is_mixture = isinstance(train, Mixture)
        order = train.order(seed) if is_mixture else SampleOrder(len(train), seed)
        self.batches = TrainBatches(
            order,
            self.batch_size,
            self._accumulate,
            self.rank,
            self.world_size,
            epoch_steps=self.lengths.epoch_steps,
            position=lambda: self._step * self._accumulate,
        )
        self._stream = train if isinstance(train, StreamDataset) else None
        # A run may find one step later that a step was not finite, when the next one was loaded.
        self.positions: deque[tuple[int, Any]] = deque([(0, None)], maxlen=3)
        self._loaded_tokens = 0  # tokens by the step that was loaded, maybe of another size

    @property
    def _step(self) -> int:
        """Number of optimizer steps that the run has done."""
        return cast(pl.Trainer, self.trainer).global_step

    @property
    def tokens(self) -> int:
        """Number of positions that the run has trained on, over all ranks and all resumes."""
        n_steps = self._step - self.batches.resumed[0]
        return self._loaded_tokens + n_steps * self.lengths.step_tokens

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run in its training data, for a checkpoint.

        All ranks must call it if the data are a stream.
        """
        state = {"step": self._step, "read": self.batches.n_read(self._step), "tokens": self.tokens}
        if self._stream is not None:
            # Neighbouring ranks that read the same samples have the same part.
            positions = dict(gather((self.rank, dict(self.positions)[self._step])))
            state["stream"] = [positions[rank] for rank in range(self.world_size)]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict` in a fit, from which the training continues.

        Does nothing outside of a fit.

        Raises:
            ConfigError: If a stream was divided over another number of data ranks.
        """
        if cast(pl.Trainer, self.trainer).state.fn != "fit":
            return
        self.batches.resumed = (state_dict["step"], state_dict["read"])
        self._loaded_tokens = state_dict["tokens"]
        own = None
        if self._stream is not None and (positions := state_dict.get("stream")):
            if len(positions) != self.world_size:
                message = f"the stream was divided over {len(positions)} ranks that read other data"
                raise ConfigError.of("trainer.devices", None, f"{message}, not {self.world_size}")
            own = positions[self.rank]
        self.positions.append((state_dict["step"], own))

    def train_dataloader(self) -> DataLoader:
        """Return the loader of this rank's training batches, from the run's position on."""
        loader = self._loader(self.train, "data.train", self.batches)
        loader.read_ahead = self._accumulate
        loader.positions = None if self._stream is None else self.positions
        return loader

    def val_dataloader(self) -> DataLoader:
        """Return the loader of this rank's validation batches."""
        return self._evaluation_loader(self.val, "data.val")

    def test_dataloader(self) -> DataLoader:
        """Return the loader of this rank's test batches. Validation data replaces missing ones."""
        return self._evaluation_loader(self.val if self.test is None else self.test, "data.test")

    def step_samples(self, step: int) -> list[int]:
        """Return the indices of the samples of a step in `train`, or [] for a stream.

        `step` counts from 0. The list has the samples of all ranks.
        """
        return [] if self._stream is not None else self.batches.step_samples(step).ravel().tolist()

    def part_of(self, batch_idx: int) -> str | None:
        """Return the name of the mixture's part to which a batch of this rank belongs.

        `batch_idx` numbers the batches of the evaluation loader that was made last. The result is
        None if its dataset is no mixture.
        """
        return self._eval_parts[self._eval_batches.part_of(batch_idx)] if self._eval_parts else None

    def _evaluation_loader(self, dataset: Any, name: str) -> DataLoader:
        """Return a loader of this rank's batches of an evaluation."""
        parts = dataset.parts if isinstance(dataset, Mixture) else {}
        lengths = [len(part) for part in parts.values() or [dataset]]
        self._eval_parts = list(parts)
        limit = self.limits.get(name.removeprefix("data."))
        batches = EvalBatches(lengths, self.batch_size, self.rank, self.world_size, limit)
        self._eval_batches = batches
        return self._loader(dataset, name, batches)

    def _loader(self, dataset: Any, name: str, batches: Iterable[list[int]]) -> "Loader":
        """Return a loader of the batches whose sample indices a batch sampler yields."""
        is_checked = name.removeprefix("data.") in self.equal_lengths
        n_positions = len(dataset[0][0]) if is_checked else None
        stream = self._stream if name == "data.train" else None
        if stream is not None:
            stream.divide(self.seed, self.rank, self.world_size, self.positions[-1][1])
        n_workers = self.num_workers if stream is None else 1
        return Loader(
            BatchReader(dataset, name, n_positions, self.vocab_size, self.seed),
            batch_sampler=batches,
            # Without a generator, DataLoader would draw the seed of its workers from the global
            # generator, and so change the random numbers of the training.
            generator=torch.Generator().manual_seed(self.seed + self.rank),
            collate_fn=collate if stream is None else stream.with_position,
            num_workers=n_workers,
            # Of a stream, the next step is read while this one is computed.
            prefetch_factor=None if stream is None else 2 * self._accumulate,
            pin_memory=self.pin_memory,
            persistent_workers=n_workers > 0,
            worker_init_fn=ignore_in_worker if n_workers else None,
            # A forked worker shares the dataset. Python 3.14 does not fork by default.
            multiprocessing_context="fork" if n_workers and sys.platform == "linux" else None,
        )


class Loader(DataLoader):
    """A DataLoader that measures waiting times, counts targets and protects workers from signals.

    It loads groups of `read_ahead` batches: in training the micro-batches of one optimizer step,
    whose number of targets must be known before the first of them is used.

    Attributes:
        waited_s: Seconds in which this process has waited for batches, since the loader was made.
        read_ahead: Number of batches of a group.
        positions: Deque to which the position after each group is appended. The batches then come
            as pairs (batch, position). None for a dataset that is no stream.
        step_targets: Number of targets of each group that was loaded in this epoch, without those
            of batches of another form. `GPTStrategy` removes the number of a training step when the
            step begins.
    """

    waited_s = 0.0
    read_ahead = 1
    positions: deque[tuple[int, Any]] | None = None
    step_targets: Sequence[int] = ()

    # DataLoader declares that this method returns its own iterator class.
    def __iter__(self) -> Iterator[Any]:  # ty: ignore[incompatible-method-override]
        """Yield the batches of one epoch, after each group of `read_ahead` batches was loaded."""
        # torch's own handler would end a worker that does not ignore SIGTERM yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # workers inherit it
        try:
            batches: Iterator[Any] = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        atexit.unregister(kill_workers)  # register the function only once
        atexit.register(kill_workers)
        self.step_targets = []
        start_s = time.perf_counter()
        while step := list(islice(batches, self.read_ahead)):
            self.waited_s += time.perf_counter() - start_s
            if self.positions is not None:
                step, positions = zip(*step, strict=True)
                self.positions.append((self.positions[-1][0] + 1, positions[-1]))
            known = [targets for batch in step if (targets := find_targets(batch)) is not None]
            self.step_targets.append(sum(int((targets != IGNORED).sum()) for targets in known))
            yield from step
            start_s = time.perf_counter()
