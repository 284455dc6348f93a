"""Builds the datasets of a run, and checks that the module can read their samples."""

from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.utils import get_method
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, Subset

from gptrain.assemble.load import build_target
from gptrain.assemble.module import module_class
from gptrain.core.data_schema import DataModuleConfig
from gptrain.core.errors import BAD_DATA, ConfigError
from gptrain.core.labels import count_text
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import RunConfig
from gptrain.data import BatchReader, Mixture, as_pairs
from gptrain.data.order import limit_lengths
from gptrain.data.samples import has_documents, len_of
from gptrain.data.stream import UNKNOWN_LENGTH, as_indexed, find_stream
from gptrain.lit.lightning import RankEnvironment
from gptrain.lit.messages import misconfiguration_as_config_error
from gptrain.lit.module import LanguageModel
from gptrain.lit.user_data import LOADERS, UserData
from gptrain.runtime.devices import find_devices
from gptrain.runtime.process import this_process

Datasets: TypeAlias = tuple[Dataset, Dataset, Dataset | None]  # training, validation and test set
INDEXED = "a torch.utils.data.Dataset with __len__ and __getitem__(index)"
USER_PAIR = "batches (tokens (B, T), targets (B, T)), or a module._target_ that reads these"
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}
PAIR = (
    "a pair (tokens (T,), targets (T,)) of int64, with document numbers (T,) as a third item if "
    "documents must not see each other, or a dict of input_ids and labels"
)


def build_user_data(cfg: RunConfig, section: DataModuleConfig) -> UserData:
    """Build a user's LightningDataModule, and set it up, to know the number of its batches.

    `prepare_data` is called on the first rank of each node, `setup` on every rank. Lightning calls
    both again when the run begins. Until then the attribute `trainer` of the module is a Trainer
    that only knows the ranks.

    Args:
        cfg: Configuration of the run.
        section: The data group, whose `_target_` is the module.

    Returns:
        The data module, with the facts about its batches that a run needs.

    Raises:
        ConfigError: If the object is no LightningDataModule, if Lightning refuses its hooks or its
            loader, or if nothing ends the run, because the number of its batches is not known.
        DataError: If the first batch is needed to know the batch size, and there is none.
        Exception: Any exception that the module itself raises.
    """
    key = "data._target_"
    module = build_target(section.plain(), key)
    if not isinstance(module, pl.LightningDataModule):
        message = f"made a {type(module).__name__}"
        raise ConfigError.of(key, section.target, message, hint="a LightningDataModule")
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
    data = UserData(module, loader, key, devices.world_size)
    check_end(cfg, key, section.target, data)
    return data


def build_dataset(cfg: RunConfig, name: Literal["train", "val", "test"]) -> Dataset:
    """Build the dataset `data.<name>`.

    An iterable dataset is wrapped into one with an index: the training set is then read during the
    run. Of any other set, all samples are read into memory now, or as many as an integer
    `trainer.limit_<name>_batches` counts. For a LanguageModel, dicts in the form of Hugging Face
    are turned into pairs of tokens and targets, with a warning about keys that are not used. Any
    other error of the dataset's own class passes unchanged.

    Args:
        cfg: Configuration of the run.
        name: Key of the dataset in the data group.

    Raises:
        ConfigError: If `data` is a LightningDataModule, if a file is missing (exit code 66), if the
            object is no dataset, or if the training set is iterable and nothing ends the run, or
            `trainer.overfit_batches` is set.
    """
    if isinstance(cfg.data, DataModuleConfig):
        message = "a LightningDataModule, of which only train.py knows the samples"
        raise ConfigError.of("data._target_", cfg.data.target, message, hint="data.train._target_")
    key, section = f"data.{name}", getattr(cfg.data, name)
    limit = getattr(cfg.trainer, f"limit_{name}_batches")
    n_samples = None  # all
    if type(limit) is int:  # batches that all ranks together evaluate
        n_samples = max(1, limit) * cfg.data.batch_size
    dataset = as_indexed(build_target(section.node(), key), key, n_samples)
    if not all(hasattr(dataset, method) for method in ("__len__", "__getitem__")):
        message = f"made a {type(dataset).__name__}, whose samples have no index"
        raise ConfigError.of(f"{key}._target_", section.target, message, hint=INDEXED)
    if find_stream(dataset):
        check_end(cfg, f"{key}._target_", section.target, dataset)
        if value := cfg.trainer.overfit_batches:
            overfit, message = "trainer.overfit_batches", "a stream has no index, and is read once"
            raise ConfigError.of(overfit, value, message, hint=f"{overfit}=0")
    module_type: Any = get_method(cfg.module.target)
    return as_pairs(dataset, key) if issubclass(module_type, LanguageModel) else dataset


def check_end(cfg: RunConfig, key: str, target: str, dataset: Dataset) -> None:
    """Check that a training ends although the length of its data may not be known.

    Does nothing for an evaluation.

    Args:
        cfg: Configuration of the run.
        key: Config key of the data, for the error.
        target: Value of the key.
        dataset: Training set.

    Raises:
        ConfigError: If the data have no length and nothing else ends the run.
    """
    trainer = cfg.trainer
    has_end = trainer.max_steps != -1 or cfg.max_tokens or trainer.max_time or trainer.fast_dev_run
    if cfg.task == "fit" and len_of(dataset) >= UNKNOWN_LENGTH and not has_end:
        hint = "trainer.max_steps=1000, or max_tokens=1e9"
        raise ConfigError.of(key, target, "a stream without a length", hint=hint)


def build_datasets(cfg: RunConfig) -> Datasets:
    """Build the training, validation and test set.

    Args:
        cfg: Configuration of the run.

    Returns:
        The three datasets. The test set is None if the config has none, and is not checked or
        wrapped if the run does not read it. For a user's LightningDataModule the first two are the
        same UserData, and the test set is None.

    Raises:
        ConfigError: If one of them cannot be used.
        Exception: Any exception that the class of a dataset or of a data module raises.
    """
    if isinstance(cfg.data, DataModuleConfig):
        data = build_user_data(cfg, cfg.data)
        return data, data, None
    train, val = build_dataset(cfg, "train"), build_dataset(cfg, "val")
    if cfg.data.test is None:
        return train, val, None
    if not reads_test_set(cfg):  # the run does not read its samples
        return train, val, build_target(cfg.data.test.node(), "data.test")
    return train, val, build_dataset(cfg, "test")


def reads_test_set(cfg: RunConfig) -> bool:
    """Return whether the run reads the test set: with task=test, and under fast_dev_run."""
    return cfg.task == "test" or bool(cfg.trainer.fast_dev_run)


def check_samples(
    cfg: RunConfig, module: type[pl.LightningModule], datasets: Datasets, world_size: int
) -> None:
    """Check the first sample of each dataset that this run reads, and that no rank lacks a batch.

    Only samples that the steps of LanguageModel itself read are checked: steps that a user wrote
    may read samples of any form.

    Args:
        cfg: Configuration of the run.
        module: Class of the module group.
        datasets: Training, validation and test set.
        world_size: Number of ranks that see different samples.

    Raises:
        ConfigError: If a sample or the number of samples does not fit, with exit code 65.
        DataError: If torch cannot turn the first sample into a batch.
    """
    train, val, test = datasets
    test = val if test is None else test
    read = {
        "train": (cfg.task == "fit", train),
        "val": (cfg.task in ("fit", "validate"), val),
        "test": (reads_test_set(cfg), test),
    }
    for name, (is_read, dataset) in read.items():
        limit = getattr(cfg.trainer, f"limit_{name}_batches")
        if not is_read or limit == 0:
            continue
        if name != "train" and len_of(dataset) == 0:
            raise ConfigError.of(f"data.{name}", None, "no samples", code=BAD_DATA)
        is_own = name not in read_as_pairs(module)
        if name != "train" and is_own and not isinstance(dataset, UserData):
            check_evaluation(f"data.{name}", dataset, world_size, cfg.data.batch_size, limit)
        if not is_own and len_of(dataset):
            check_pair(f"data.{name}", dataset)


def read_as_pairs(module: type[pl.LightningModule]) -> set[str]:
    """Return for which of "train", "val" and "test" the module inherits LanguageModel's step.

    Such a step reads pairs (tokens, targets). A step that a user wrote may read batches of any
    form.

    Args:
        module: Class of a LightningModule.
    """
    return {
        name
        for name, step in STEPS.items()
        if getattr(module, step, None) is getattr(LanguageModel, step)
    }


def check_pair(key: str, dataset: Dataset) -> None:
    """Check that the first sample is a pair (tokens, targets) that LanguageModel can train on.

    Args:
        key: Config key of the dataset, for the error.
        dataset: Dataset with at least one sample.

    Raises:
        ConfigError: If the sample has another form, with exit code 65.
        DataError: If torch cannot turn the sample into a batch.
    """
    batch = BatchReader(dataset, key).__getitems__([0])
    is_pair = isinstance(batch, tuple) and (len(batch) == 2 or has_documents(batch))
    items = batch[:2] if is_pair else ()
    tensors = [item for item in items if isinstance(item, Tensor)]  # tokens, targets
    if len(tensors) == 2:
        tokens, targets = tensors
        is_integer = targets.dtype == torch.int64 and not tokens.dtype.is_floating_point
        if is_integer and tokens.ndim == 2 and tokens.shape == targets.shape:
            return
    shapes = tree_map(describe_value, dataset[0])
    message = f"sample 0 is {shapes!s:.200}"
    hint = USER_PAIR if isinstance(dataset, UserData) else PAIR
    raise ConfigError.of(key, None, message, hint=hint, code=BAD_DATA)


def describe_value(value: Any) -> str:
    """Return the dtype and shape of a tensor or an array, or the name of another type."""
    is_array = isinstance(value, Tensor | np.ndarray)
    return f"{value.dtype} {tuple(value.shape)}" if is_array else type(value).__name__


def check_evaluation(
    key: str, dataset: Dataset, world_size: int, batch_size: int = 1, limit: float | None = None
) -> None:
    """Check that an evaluation set has a sample for each rank, for a step that a user wrote.

    LanguageModel evaluates a batch without targets on a rank that has no sample. Other steps cannot
    be given such a batch.

    Args:
        key: Config key of the dataset, for the error.
        dataset: Validation or test set. Each part of a mixture is checked.
        world_size: Number of ranks that see different samples.
        batch_size: Samples of a batch.
        limit: Number of batches that are evaluated, or their fraction. None for all.

    Raises:
        ConfigError: If a rank would have no sample, with exit code 65.
    """
    parts = dataset.parts.values() if isinstance(dataset, Mixture) else [dataset]
    n_samples = min(limit_lengths([*map(len_of, parts)], batch_size, limit))
    if n_samples < world_size:
        n_text = count_text(n_samples, "sample")
        message = f"{n_text} for {world_size} ranks: a rank would have no batch"
        hint = f"trainer.devices={n_samples}, or more samples"
        raise ConfigError.of(key, None, message, hint=hint, code=BAD_DATA)


def check_sample(cfg: RunConfig, sample: Any) -> int | None:
    """Check the token ids of a sample against the size of the net's embedding.

    On a GPU the first step would otherwise end in a device-side assertion without a message. A
    sample is a sequence of tokens if its first tensor with a dimension holds integers (T,).

    Args:
        cfg: Configuration of the run.
        sample: First sample of the training set, in any form.

    Returns:
        The number of positions T, or None if the sample is no sequence of tokens.

    Raises:
        ConfigError: If a token id is not below `model.vocab_size`, with exit code 65.
    """
    leaves = tree_leaves(sample[:2] if has_documents(sample) else sample)
    arrays = [leaf for leaf in leaves if isinstance(leaf, Tensor | np.ndarray)]
    tensors = [tensor for tensor in map(torch.as_tensor, arrays) if tensor.ndim]
    if not tensors or not _is_sequence(tensors[0]):
        return None
    sequences = [tensor for tensor in tensors if _is_sequence(tensor)]
    vocab_size = cfg.model.arguments.get("vocab_size")
    highest = int(max(sequence.max() for sequence in sequences))
    if isinstance(vocab_size, int) and highest >= vocab_size:
        message = f"data.train has token {highest} in its first sample"
        hint = f"model.vocab_size={highest + 1} or above"
        raise ConfigError.of("model.vocab_size", vocab_size, message, hint=hint, code=BAD_DATA)
    return len(sequences[0])


def tokens_to_compare(cfg: RunConfig, strategy: str, sample: Any) -> Tensor | None:
    """Return the tokens (T,) of a sample, on which the strategy is tried before the training.

    `build_strategy` runs a user's net on these tokens, plain and partitioned, and compares them.

    Args:
        cfg: Configuration of the run.
        strategy: Name of the strategy.
        sample: First training sample, in any form that the module accepts.

    Returns:
        The first sequence of integers in the sample. None if there is none, or if the module is not
        a LanguageModel and so computes its loss itself.
    """
    if not issubclass(module_class(cfg, strategy), LanguageModel):
        return None
    tensors = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    return next((tensor for tensor in tensors if _is_sequence(tensor) and len(tensor)), None)


def _is_sequence(tensor: Tensor) -> bool:
    """Return whether a tensor can be a sequence of tokens: it has one dimension and no floats."""
    return tensor.ndim == 1 and not tensor.dtype.is_floating_point


def first_batches(dataset: Dataset, batches: float, batch: BatchPlan) -> Dataset:
    """Return the first micro-batches of a dataset, for `trainer.overfit_batches`.

    Args:
        dataset: Training set.
        batches: Number of micro-batches of each rank, or a fraction of the dataset. At least one
            optimizer step is returned if the dataset is long enough.
        batch: Batch arithmetic of the run.
    """
    sequences = batch.batch_size * batch.data_parallel_size
    n_all = len_of(dataset)
    n_samples = int(batches * n_all) if isinstance(batches, float) else batches * sequences
    return Subset(dataset, range(min(n_all, max(n_samples, batch.global_batch_size))))
