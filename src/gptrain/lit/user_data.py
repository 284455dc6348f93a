"""Facts about a LightningDataModule that a user wrote, in the form in which gptrain reads them."""

from collections.abc import Sized
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from gptrain.core.errors import ConfigError, DataError
from gptrain.core.lengths import RunLengths
from gptrain.data.stream import UNKNOWN_LENGTH

USER_DATA = "gptrain_data"  # attribute of a LightningDataModule: its UserData
# Method of a data module whose batches a task reads first.
LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}


class UserData(Dataset):
    """Facts about the batches of a user's LightningDataModule: batch size, epoch length, a sample.

    Lightning reads the batches from the data module itself. gptrain's callbacks use this object in
    the place of a TextDataModule, and the checks before a run as a dataset: its length is that of
    an epoch, and every index gives the first sample.

    Args:
        module: User's data module, after its `setup`.
        loader: Loader of the batches that the run reads first.
        key: Config key of the data module, for error messages.
        world_size: Number of ranks, over which Lightning divides the samples of the loader.

    Attributes:
        module: User's data module.
        batch_size: Samples of a batch of one rank, counted in the first batch if the dataset makes
            the batches.
        lengths: Lengths of the run. It exists once `start` was called.
        train, val: None, because the datasets are not known.

    Raises:
        ConfigError: If the loader is no DataLoader.
        DataError: If the first batch is needed, and the loader has no batch.
    """

    train = val = None
    lengths: RunLengths

    def __init__(self, module: pl.LightningDataModule, loader: Any, key: str, world_size: int):
        self.module = module
        self._loader = loader
        if not isinstance(loader, DataLoader):
            message = f"its loader is a {type(loader).__name__}; needed: a DataLoader"
            hint = "data.train._target_ and data.val._target_, a dataset or a stream each"
            raise ConfigError.of(key, type(module).__name__, message, hint=hint)
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        n_batches = _count_batches(loader, size or 1, world_size)
        if size is None:
            leaves = tree_leaves(self._first_batch())
            size = next((len(leaf) for leaf in leaves if getattr(leaf, "ndim", 0)), 1)
        self.batch_size = size
        self._n_samples = n_batches * size * world_size

    def __len__(self) -> int:
        """Return the number of samples of an epoch on all ranks. Each batch counts as full."""
        return self._n_samples

    def __getitem__(self, index: int) -> Any:
        """Return the first sample of the first batch, whatever the index."""
        batch = self._first_batch()
        return tree_map(lambda leaf: leaf[0] if getattr(leaf, "ndim", 0) else leaf, batch)

    def _first_batch(self) -> Any:
        """Return the first batch as the training step gets it, but as a tuple if it is a list."""
        batch = next(iter(self._loader), None)
        if batch is None:
            raise DataError(f"the loader of {type(self.module).__name__} has no batch")
        # The hooks by which a data module transfers a batch to the device may change it.
        batch = self.module.on_before_batch_transfer(batch, 0)
        batch = self.module.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        batch = self.module.on_after_batch_transfer(batch, 0)
        # torch's collation makes a list of a tuple.
        return tuple(batch) if isinstance(batch, list) else batch

    def describe(self, n_samples: int) -> str:
        """Return the text of the start line `data`, which names what is not exact.

        `n_samples` is ignored.
        """
        effect = "a resume within an epoch starts its order again, ranks may evaluate samples twice"
        batch = self.lengths.batch
        n_left = self._n_samples // (batch.batch_size * batch.data_parallel_size) % batch.accumulate
        if n_left and batch.global_batch_size < self._n_samples < UNKNOWN_LENGTH:
            effect += f", the last {n_left} batches of an epoch fill no step and are not read"
        return f"{type(self.module).__name__} · not exact: {effect}"

    def start(self, lengths: RunLengths) -> None:
        """Store the lengths of the run, and make this object known to gptrain's callbacks.

        From then on `lightning.data_of` finds it, through an attribute of the data module.
        """
        self.lengths = lengths
        setattr(self.module, USER_DATA, self)

    @property
    def tokens(self) -> int:
        """Number of positions that all ranks have trained on, if all batches are full."""
        return cast(pl.Trainer, self.module.trainer).global_step * self.lengths.step_tokens

    def step_samples(self, step: int) -> list[int]:
        """Return an empty list, because the indices of the samples of a step are not known."""
        return []


def _count_batches(loader: DataLoader, batch_size: int, world_size: int) -> int:
    """Return the number of batches of an epoch on each rank, or UNKNOWN_LENGTH for a stream."""
    n_batches = sized_len(loader) or UNKNOWN_LENGTH
    is_divided = isinstance(loader.sampler, DistributedSampler)
    if world_size == 1 or is_divided or isinstance(loader.dataset, IterableDataset):
        return n_batches
    # Lightning gives all ranks equally many samples: it repeats the first ones.
    n_samples = -(-len(cast(Sized, loader.sampler)) // world_size)
    drop_last = getattr(loader.batch_sampler, "drop_last", False)
    return len(BatchSampler(range(n_samples), batch_size, drop_last))
