"""The data sets of a run: they are built, and held against the module before it trains on them."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from hydra.utils import get_method
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, Subset

from gptrain.assemble.load import build_target
from gptrain.assemble.module import module_class
from gptrain.core.errors import BAD_DATA, ConfigError
from gptrain.core.lengths import BatchPlan
from gptrain.core.schema import RunConfig
from gptrain.data import BatchReader, Mixture, as_pairs
from gptrain.data.samples import describe, len_of
from gptrain.lit.module import LanguageModel

Datasets: TypeAlias = tuple[Dataset, Dataset, Dataset | None]  # the last is for a test
INDEXED = "a torch.utils.data.Dataset with __len__ and __getitem__(index)"
STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}
PAIR = "a pair (tokens (T,), targets (T,)) of int64, or a dict of input_ids and labels"


def build_dataset(cfg: RunConfig, name: Literal["train", "val", "test"]) -> Dataset:
    """Build `data.<name>`. For a LanguageModel dicts of Hugging Face's form become pairs.

    Raises:
        ConfigError: If its samples cannot be read by an index.
    """
    key, section = f"data.{name}", getattr(cfg.data, name)
    dataset = build_target(section.node())
    if not all(hasattr(dataset, method) for method in ("__len__", "__getitem__")) or isinstance(
        dataset, IterableDataset
    ):
        message = f"made a {type(dataset).__name__}, whose samples have no index"
        raise ConfigError.of(f"{key}._target_", section.target, message, hint=INDEXED)
    made: Any = get_method(cfg.module.target)
    return as_pairs(dataset, key) if issubclass(made, LanguageModel) else dataset


def build_datasets(cfg: RunConfig) -> Datasets:
    """Build the training, validation and test set; None if no test set is given."""
    train, val = build_dataset(cfg, "train"), build_dataset(cfg, "val")
    if cfg.data.test is None:
        return train, val, None
    if not tests(cfg):  # its samples are not looked at
        return train, val, build_target(cfg.data.test.node())
    return train, val, build_dataset(cfg, "test")


def tests(cfg: RunConfig) -> bool:
    """Whether the run reads the test set."""
    return cfg.task == "test" or bool(cfg.trainer.fast_dev_run)


def check_samples(
    cfg: RunConfig, module: type[pl.LightningModule], datasets: Datasets, world_size: int
) -> None:
    """Check the first sample of each data set that this run reads, and that no rank lacks a batch.

    Steps of a user's own may read samples of any form: only those of LanguageModel are judged.

    Args:
        module: Class of the module group.
        world_size: Ranks that see different samples.

    Raises:
        ConfigError: With exit code 65.
    """
    train, val, test = datasets
    test = val if test is None else test
    read = {
        "train": (cfg.task == "fit", train),
        "val": (cfg.task in ("fit", "validate"), val),
        "test": (tests(cfg), test),
    }
    for name, (is_read, dataset) in read.items():
        if not is_read or getattr(cfg.trainer, f"limit_{name}_batches") == 0:
            continue
        is_own = name not in read_as_pairs(module)
        if name != "train":
            check_evaluation(f"data.{name}", dataset, world_size, is_own)
        if not is_own and len_of(dataset):
            check_pair(f"data.{name}", dataset)


def read_as_pairs(module: type[pl.LightningModule]) -> set[str]:
    """Return which of "train", "val" and "test" are read by a step of LanguageModel itself."""
    return {
        name
        for name, step in STEPS.items()
        if getattr(module, step, None) is getattr(LanguageModel, step)
    }


def check_pair(key: str, dataset: Dataset) -> None:
    """Raise a ConfigError if the first sample is no pair that LanguageModel can train on."""
    batch = BatchReader(dataset, key).__getitems__([0])
    items = batch if isinstance(batch, tuple) and len(batch) == 2 else ()
    types = [item.dtype for item in items if isinstance(item, Tensor)]  # of tokens and targets
    if len(types) == 2 and types[1] == torch.int64:
        return
    message = f"sample 0 is {describe(dataset[0])}"
    raise ConfigError.of(key, None, message, hint=PAIR, code=BAD_DATA)


def check_evaluation(key: str, dataset: Dataset, world_size: int, is_own: bool) -> None:
    """Raise a ConfigError for an empty data set, or for ranks without a sample.

    Args:
        is_own: A step of the user's own evaluates the batches. It cannot be given a batch without
            targets, which LanguageModel evaluates where a rank has no sample.
    """
    parts = dataset.parts if isinstance(dataset, Mixture) else {"": dataset}
    for name, part in parts.items():
        place, n_samples = f"{key} (part {name})" if name else key, len_of(part)
        if n_samples == 0:
            hint = "trainer.limit_val_batches=0 trains without a validation"
            raise ConfigError.of(place, None, "no samples", hint=hint, code=BAD_DATA)
        if n_samples < world_size and is_own:
            message = f"{n_samples} samples for {world_size} ranks: one would have no batch"
            hint = f"trainer.devices={n_samples}, or more samples"
            raise ConfigError.of(place, None, message, hint=hint, code=BAD_DATA)


def check_sample(cfg: RunConfig, sample: Any) -> int | None:
    """Return the positions of a sample of tokens, or None if its data are no sequence of tokens.

    A sample is a sequence of tokens if its first tensor with a dimension is (T,) integers.

    Raises:
        ConfigError: If a token has no row in the net's embedding. On a GPU the first step would
            end in an assertion of the device that names nothing.
    """
    arrays = [one for one in tree_leaves(sample) if isinstance(one, Tensor | np.ndarray)]
    tensors = [one for one in map(torch.as_tensor, arrays) if one.ndim]
    is_sequence = [one.ndim == 1 and not one.dtype.is_floating_point for one in tensors]
    if not tensors or not is_sequence[0]:
        return None
    sequences = [one for one, is_one in zip(tensors, is_sequence, strict=True) if is_one]
    vocab_size, highest = (
        cfg.model.arguments.get("vocab_size"),
        int(max(one.max() for one in sequences)),
    )
    if isinstance(vocab_size, int) and highest >= vocab_size:
        message = f"data.train has token {highest} in its first sample"
        hint = f"model.vocab_size={highest + 1} or above"
        raise ConfigError.of("model.vocab_size", vocab_size, message, hint=hint, code=BAD_DATA)
    return len(sequences[0])


def tokens_to_compare(cfg: RunConfig, strategy: str, sample: Any) -> Tensor | None:
    """Return the tokens (T,) on which a net is compared with its plain form, see build_strategy.

    Returns:
        None for a module that computes its loss itself, or a sample that has no sequence of tokens.
    """
    tensors = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    integers = [one for one in tensors if one.ndim == 1 and not one.is_floating_point()]
    is_ours = issubclass(module_class(cfg, strategy), LanguageModel)
    return next((one for one in integers if len(one)), None) if is_ours else None


def first_batches(dataset: Dataset, batches: float, batch: BatchPlan) -> Dataset:
    """Return the first `batches` micro-batches (a fraction: of all), a whole step's at least."""
    sequences = batch.batch_size * batch.data_parallel_size  # of a micro-batch over all ranks
    n_all = len_of(dataset)
    n_samples = int(batches * n_all) if isinstance(batches, float) else batches * sequences
    return Subset(dataset, range(min(n_all, max(n_samples, batch.global_batch_size))))
