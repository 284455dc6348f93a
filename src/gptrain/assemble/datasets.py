"""Builds the datasets of a run, and checks that the module can read their samples."""

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.utils import get_method
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from gptrain.assemble.load import build_target
from gptrain.assemble.trainer import place_options
from gptrain.core.errors import BAD_DATA, ConfigError
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import DataModuleConfig, RunConfig
from gptrain.data import BatchReader, as_pairs
from gptrain.data.samples import has_documents
from gptrain.data.stream import UNKNOWN_LENGTH, StreamDataset, as_indexed
from gptrain.lit.messages import misconfiguration_as_config_error
from gptrain.lit.module import LanguageModel
from gptrain.lit.user_data import LOADERS, UserData
from gptrain.runtime.devices import find_devices
from gptrain.runtime.process import this_process

PAIR = "a pair of int64 (tokens (T,), targets (T,)), see gptrain.data, or a module that reads these"


def _build_user_data(cfg: RunConfig, section: DataModuleConfig) -> UserData:
    """Build a user's LightningDataModule, and set it up, to know the number of its batches.

    Lightning calls `prepare_data` and `setup` again when the run begins. A misuse of Lightning and
    a missing file are a ConfigError.
    """
    key = "data._target_"
    module: pl.LightningDataModule = build_target(section.plain(), key)
    devices = find_devices(cfg)
    strategy = "ddp" if devices.world_size > 1 else "auto"
    module.trainer = pl.Trainer(**place_options(devices, strategy), barebones=True)
    with misconfiguration_as_config_error(key):
        if this_process().local_rank == 0:
            module.prepare_data()
        module.setup(cfg.task)
        loader = getattr(module, LOADERS[cfg.task])()
    if isinstance(loader, list | tuple) and cfg.task != "fit":
        loader = loader[0]
    return UserData(module, loader, key, devices.world_size)


def _build_dataset(cfg: RunConfig, name: Literal["train", "val", "test"]) -> Any:
    """Build `data.<name>`, as pairs for a LanguageModel."""
    key, section = f"data.{name}", getattr(cfg.data, name)
    limit = getattr(cfg.trainer, f"limit_{name}_batches")
    # An integer is the number of batches that all ranks together evaluate.
    n_samples = max(1, limit) * cfg.data.batch_size if type(limit) is int else None
    dataset = as_indexed(build_target(section.node(), key), key, n_samples)
    if isinstance(dataset, StreamDataset) and (value := cfg.trainer.overfit_batches):
        overfit, message = "trainer.overfit_batches", "a stream has no index, and is read once"
        raise ConfigError.of(overfit, value, message, hint=f"{overfit}=0")
    module_type: Any = get_method(cfg.module.target)
    return as_pairs(dataset, key) if issubclass(module_type, LanguageModel) else dataset


def build(cfg: RunConfig) -> tuple[Any, Any, Any]:
    """Build the training, validation and test set of a run. The function uses no collective.

    The first call on a machine may write caches, such as the tokens of a corpus. The test set is
    None if `data.test` is not given. For a LightningDataModule one UserData is both the training
    and the validation set, and the test set is None.

    Raises:
        ConfigError: If a file is missing (exit code 66), if a stream is to be overfitted, or if
            Lightning refuses the LightningDataModule.
        DataError: If data of gptrain's datasets are empty or damaged, or if a class makes no
            dataset with `__len__` and `__getitem__`. Other errors of the classes pass unchanged.
    """
    if isinstance(cfg.data, DataModuleConfig):
        data = _build_user_data(cfg, cfg.data)
        return data, data, None
    train, val = _build_dataset(cfg, "train"), _build_dataset(cfg, "val")
    # Also for a fit: a user's train.py may test after it.
    return train, val, None if cfg.data.test is None else _build_dataset(cfg, "test")


def check_samples(cfg: RunConfig, module: type[pl.LightningModule], datasets: Sequence) -> None:
    """Check that the training has an end, and the first sample of each dataset that the run reads.

    The sample must be a pair of tokens and targets if `read_as_pairs` has the dataset. Otherwise it
    may have any form. An empty training set passes.

    Args:
        module: Class of the module.
        datasets: Result of `build`. A test set of None stands for the validation set.

    Raises:
        ConfigError: If the training data are a stream without a length and nothing ends the run
            (exit code 2), or if a sample is no such pair, or if the validation or test set is empty
            (65).
    """
    (train, val, test), pairs = datasets, read_as_pairs(module)
    read = {"train": train} if cfg.task == "fit" else {}
    if cfg.task != "test":
        read["val"] = val
    if cfg.task == "test" or cfg.trainer.fast_dev_run:
        read["test"] = val if test is None else test
    trainer = cfg.trainer
    has_end = trainer.max_steps != -1 or cfg.max_tokens or trainer.max_time or trainer.fast_dev_run
    if "train" in read and len(train) >= UNKNOWN_LENGTH and not has_end:
        message = "the data are a stream without a length"
        hint = "trainer.max_steps=1000, or max_tokens=1e9"
        raise ConfigError.of("trainer.max_steps", -1, message, hint=hint)
    for name, dataset in read.items():
        if getattr(cfg.trainer, f"limit_{name}_batches") == 0:
            continue
        if name != "train" and not len(dataset):
            raise ConfigError.of(f"data.{name}", None, "no samples", code=BAD_DATA)
        if name in pairs and len(dataset):
            _check_pair(f"data.{name}", dataset)


def read_as_pairs(module: type[pl.LightningModule]) -> set[str]:
    """Return those of "train", "val" and "test" whose step the module has from LanguageModel.

    These steps read pairs (tokens, targets). Steps that a user wrote read batches of any form.
    """
    steps = {"train": "training_step", "val": "validation_step", "test": "test_step"}
    return {n for n, s in steps.items() if getattr(module, s, None) is getattr(LanguageModel, s)}


def _check_pair(key: str, dataset: Any) -> None:
    """Raise a ConfigError unless the first sample is a pair that LanguageModel can train on."""
    source = [dataset[0]] if isinstance(dataset, StreamDataset) else dataset  # read once
    batch = BatchReader(source, key).__getitems__([0])
    is_pair = isinstance(batch, tuple) and (len(batch) == 2 or has_documents(batch))
    tensors = [item for item in batch[:2] if isinstance(item, Tensor)] if is_pair else []
    forms = [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors]
    match forms:
        case [(dtype, (n,)), form] if form == (torch.int64, (n,)) and not dtype.is_floating_point:
            return
    message = f"sample 0 is {forms or type(dataset[0]).__name__}"
    raise ConfigError.of(key, None, message, hint=PAIR, code=BAD_DATA)


def find_tokens(sample: Any) -> Tensor | None:
    """Return the first array of a sample as its tokens (T,), or None if the sample is no text.

    Args:
        sample: Tensors, numpy arrays and scalars, also nested in tuples, lists and dicts. The
            sample is no text if its first array has floats, several dimensions or no element.
    """
    leaves = tree_leaves(sample)
    arrays = (leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim)
    first = torch.as_tensor(next(arrays, 0.0))
    return first if first.ndim == 1 and not first.is_floating_point() and len(first) else None


def first_batches(dataset: Any, batches: float, batch: BatchPlan) -> Subset:
    """Return the first samples of a dataset, as `trainer.overfit_batches` asks for.

    They are at least those of one optimizer step, unless the dataset has fewer.

    Args:
        dataset: Training set with a length and an index.
        batches: Micro-batches of each rank if it is an int, the fraction of the samples if a float.
    """
    sequences = batch.batch_size * batch.data_parallel_size
    n_all = len(dataset)
    n_samples = int(batches * n_all) if isinstance(batches, float) else batches * sequences
    return Subset(dataset, range(min(n_all, max(n_samples, batch.global_batch_size))))
