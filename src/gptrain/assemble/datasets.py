"""Builds the datasets of a run, and checks that the module can read their samples."""

from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.utils import get_method
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset

from gptrain.assemble.load import build_target
from gptrain.core.errors import BAD_DATA, ConfigError
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import DataModuleConfig, RunConfig
from gptrain.data import BatchReader, as_pairs
from gptrain.data.samples import has_documents, len_of
from gptrain.data.stream import UNKNOWN_LENGTH, as_indexed, find_stream
from gptrain.lit.lightning import RankEnvironment
from gptrain.lit.messages import misconfiguration_as_config_error
from gptrain.lit.module import LanguageModel
from gptrain.lit.user_data import LOADERS, UserData
from gptrain.runtime.devices import find_devices
from gptrain.runtime.process import this_process

Datasets: TypeAlias = tuple[Dataset, Dataset, Dataset | None]  # training, validation and test set
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}
PAIR = "a pair of int64 (tokens (T,), targets (T,)), see gptrain.data, or a module that reads these"


def build_user_data(cfg: RunConfig, section: DataModuleConfig) -> UserData:
    """Build a user's LightningDataModule, and set it up, to know the number of its batches.

    Lightning calls `prepare_data` and `setup` again when the run begins. A misuse of Lightning and
    a missing file are a ConfigError.
    """
    key = "data._target_"
    module: pl.LightningDataModule = build_target(section.plain(), key)
    devices, process = find_devices(cfg), this_process()
    module.trainer = pl.Trainer(
        accelerator=devices.accelerator,
        devices=1 if devices.accelerator == "cuda" else devices.n_local,
        num_nodes=devices.n_nodes,
        strategy="ddp" if devices.world_size > 1 else "auto",
        plugins=[RankEnvironment(process, devices.n_local)],
        barebones=True,
    )
    with misconfiguration_as_config_error(key):
        if process.local_rank == 0:
            module.prepare_data()
        module.setup(cfg.task)
        loader = getattr(module, LOADERS[cfg.task])()
    if isinstance(loader, list | tuple) and cfg.task != "fit":
        loader = loader[0]
    return UserData(module, loader, key, devices.world_size)


def build_dataset(cfg: RunConfig, name: Literal["train", "val", "test"]) -> Dataset:
    """Build `data.<name>`, as pairs for a LanguageModel. A ConfigError if it has no index."""
    key, section = f"data.{name}", getattr(cfg.data, name)
    limit = getattr(cfg.trainer, f"limit_{name}_batches")
    # An integer is the number of batches that all ranks together evaluate.
    n_samples = max(1, limit) * cfg.data.batch_size if type(limit) is int else None
    dataset = as_indexed(build_target(section.node(), key), key, n_samples)
    if not all(hasattr(dataset, method) for method in ("__len__", "__getitem__")):
        message = f"made a {type(dataset).__name__} without __len__ and __getitem__(index)"
        raise ConfigError.of(f"{key}._target_", section.target, message)
    if find_stream(dataset) and (value := cfg.trainer.overfit_batches):
        overfit, message = "trainer.overfit_batches", "a stream has no index, and is read once"
        raise ConfigError.of(overfit, value, message, hint=f"{overfit}=0")
    module_type: Any = get_method(cfg.module.target)
    return as_pairs(dataset, key) if issubclass(module_type, LanguageModel) else dataset


def build_datasets(cfg: RunConfig) -> Datasets:
    """Build the training, validation and test set.

    The last is None if `data.test` is not given.
    A LightningDataModule becomes one UserData, which is both the first and the second.
    """
    if isinstance(cfg.data, DataModuleConfig):
        data = build_user_data(cfg, cfg.data)
        return data, data, None
    train, val = build_dataset(cfg, "train"), build_dataset(cfg, "val")
    # Also for a fit: a user's train.py may test after it.
    return train, val, None if cfg.data.test is None else build_dataset(cfg, "test")


def reads_test_set(cfg: RunConfig) -> bool:
    """Return whether the run reads the test set: with task=test, and under fast_dev_run."""
    return cfg.task == "test" or bool(cfg.trainer.fast_dev_run)


def check_samples(cfg: RunConfig, module: type[pl.LightningModule], datasets: Datasets) -> None:
    """Check that the training has an end, and the first sample of each dataset that is read.

    Steps that a user wrote may read samples of any form, which are not checked. Raises a
    ConfigError, about the samples with exit code 65.
    """
    (train, val, test), pairs = datasets, read_as_pairs(module)
    read = {"train": train} if cfg.task == "fit" else {}
    if cfg.task != "test":
        read["val"] = val
    if reads_test_set(cfg):
        read["test"] = val if test is None else test
    trainer = cfg.trainer
    has_end = trainer.max_steps != -1 or cfg.max_tokens or trainer.max_time or trainer.fast_dev_run
    if "train" in read and len_of(train) >= UNKNOWN_LENGTH and not has_end:
        hint = "trainer.max_steps=1000, or max_tokens=1e9"
        raise ConfigError.of(
            "trainer.max_steps", -1, "the data are a stream without a length", hint=hint
        )
    for name, dataset in read.items():
        if getattr(cfg.trainer, f"limit_{name}_batches") == 0:
            continue
        if name != "train" and not len_of(dataset):
            raise ConfigError.of(f"data.{name}", None, "no samples", code=BAD_DATA)
        if name in pairs and len_of(dataset):
            check_pair(f"data.{name}", dataset)


def read_as_pairs(module: type[pl.LightningModule]) -> set[str]:
    """Return which of "train", "val" and "test" are read by a step that LanguageModel defines.

    Such a step reads pairs (tokens, targets), a step that a user wrote batches of any form.
    """
    steps = STEPS.items()
    return {n for n, s in steps if getattr(module, s, None) is getattr(LanguageModel, s)}


def check_pair(key: str, dataset: Dataset) -> None:
    """Raise a ConfigError unless the first sample is a pair that LanguageModel can train on."""
    batch = BatchReader(dataset, key).__getitems__([0])
    is_pair = isinstance(batch, tuple) and (len(batch) == 2 or has_documents(batch))
    tensors = [item for item in batch[:2] if isinstance(item, Tensor)] if is_pair else []
    forms = [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors]
    if len(forms) == 2:
        (dtype, shape), targets = forms
        if len(shape) == 1 and targets == (torch.int64, shape) and not dtype.is_floating_point:
            return
    message = f"sample 0 is {forms or type(dataset[0]).__name__}"
    raise ConfigError.of(key, None, message, hint=PAIR, code=BAD_DATA)


def find_tokens(sample: Any) -> Tensor | None:
    """Return the tokens (T,) of a sample of text, or None if its first values are no integers."""
    leaves = tree_leaves(sample)
    arrays = (leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim)
    first = torch.as_tensor(next(arrays, 0.0))
    return first if first.ndim == 1 and not first.is_floating_point() and len(first) else None


def first_batches(dataset: Dataset, batches: float, batch: BatchPlan) -> Dataset:
    """Return the first micro-batches per rank, or a fraction of the data, but at least one step."""
    sequences = batch.batch_size * batch.data_parallel_size
    n_all = len_of(dataset)
    n_samples = int(batches * n_all) if isinstance(batches, float) else batches * sequences
    return Subset(dataset, range(min(n_all, max(n_samples, batch.global_batch_size))))
