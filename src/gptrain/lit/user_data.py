"""UserData: what a run knows about a LightningDataModule that a user wrote."""

from collections.abc import Sized
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from gptrain.core.errors import ConfigError
from gptrain.core.lengths import RunLengths
from gptrain.data.stream import UNKNOWN_LENGTH

USER_DATA = "gptrain_data"  # attribute of a user's module: its UserData
# Method of a data module whose batches a task reads first.
LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}


class UserData(Dataset):
    """Stands for the batches of a user's LightningDataModule where gptrain needs facts about them.

    Lightning uses the module itself. This object has the attributes of a TextDataModule that
    callbacks read. As a dataset it has the length of an epoch, and only its first sample.

    Args:
        module: Module of the user, after its `setup`.
        loader: Loader of the batches that the run reads first.
        key: Config key of the module, for error messages.
        world_size: Number of ranks. Lightning divides the samples of the loader over the ranks.

    Attributes:
        batch_size: Samples of a batch of one rank.
        epoch_batches: Batches of one epoch on each rank, or UNKNOWN_LENGTH.

    Raises:
        ConfigError: If the size of a batch is not known.
    """

    train = val = None
    epoch_steps: int
    validate_every: int
    step_tokens: int

    def __init__(self, module: pl.LightningDataModule, loader: Any, key: str, world_size: int):
        self.module = module
        self.world_size = world_size
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
        if not isinstance(loader, DataLoader) or size is None:
            message = "its loader is no DataLoader with a batch size"
            hint = "data.train._target_ and data.val._target_, a dataset or a stream each"
            raise ConfigError.of(key, type(module).__name__, message, hint=hint)
        self.loader = loader
        self.batch_size = size
        self.epoch_batches = sized_len(loader) or UNKNOWN_LENGTH
        is_divided = isinstance(loader.sampler, DistributedSampler)
        if world_size > 1 and not is_divided and not isinstance(loader.dataset, IterableDataset):
            # Lightning gives all ranks equally many samples: it repeats the first ones.
            n_samples = -(-len(cast(Sized, loader.sampler)) // world_size)
            is_cut = getattr(sampler, "drop_last", False)
            self.epoch_batches = n_samples // size if is_cut else -(-n_samples // size)

    def __len__(self) -> int:
        """Return the number of samples of an epoch, in which each batch counts as a full one."""
        return self.epoch_batches * self.batch_size * self.world_size

    def __getitem__(self, index: int) -> Any:
        """Return the first sample of the first batch, after the module's transfer hooks."""
        batch = self.module.on_before_batch_transfer(next(iter(self.loader)), 0)
        batch = self.module.transfer_batch_to_device(batch, torch.device("cpu"), 0)
        batch = self.module.on_after_batch_transfer(batch, 0)
        if isinstance(batch, list):  # torch's collation makes a list of a tuple
            batch = tuple(batch)
        return tree_map(lambda leaf: leaf[0] if getattr(leaf, "ndim", 0) else leaf, batch)

    def describe(self, n_samples: int) -> str:
        """Return the text of the start line `data`: class of the module and length of an epoch.

        It also says what gptrain's own data guarantees and a user's module does not: that a resume
        within an epoch continues with the next sample, and, with several ranks, that an evaluation
        counts each sample once.

        Args:
            n_samples: Number of samples that the run reads. Not used: the number of epochs is not
                shown.
        """
        twice = " · evaluations may count a sample twice" if self.world_size > 1 else ""
        is_known = self.epoch_batches != UNKNOWN_LENGTH
        length = f"{self.epoch_batches} batches per rank and epoch" if is_known else "a stream"
        return (
            f"{type(self.module).__name__} · {length} · "
            "not exact on a resume within an epoch: its order starts again, so that samples "
            f"repeat and others are left out{twice}"
        )

    def start(self, lengths: RunLengths) -> None:
        """Take the lengths of the run, and set this object as an attribute of the module.

        `lit.lightning.data_of` finds it there.

        Args:
            lengths: Lengths of the run, computed from `batch_size` and `len()` of this object.
        """
        self.epoch_steps = lengths.epoch_steps
        self.validate_every = lengths.validate_every
        self.step_tokens = lengths.step_tokens
        setattr(self.module, USER_DATA, self)

    @property
    def tokens(self) -> int:
        """Number of positions that the run has trained on, if all batches are full."""
        return cast(pl.Trainer, self.module.trainer).global_step * self.step_tokens

    def step_samples(self, step: int, rank: int | None = None) -> list[int]:
        """Return an empty list: the indices of a step's samples are not known."""
        return []


class SeedAfterSetup(pl.Callback):
    """Sets the random seed of a rank after the `setup` of a user's data module.

    The module's `setup` sees one seed on all ranks: a random split is the same on each of them.

    Args:
        seed: Seed of this rank, for example for dropout, which differs between ranks.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set the seed. Lightning has called the data module's `setup` before."""
        torch.manual_seed(self.seed)


def has_loader(datamodule: pl.LightningDataModule, task: str) -> bool:
    """Return whether a data module has the loader that a task reads.

    Args:
        datamodule: Data module of the run.
        task: Key of LOADERS: "fit", "validate" or "test".
    """
    return is_overridden(LOADERS[task], datamodule)
