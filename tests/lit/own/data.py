"""Datasets as a user writes them."""

import json
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from gptrain.data import DummyTextDataset


class Samples(Dataset):
    """The samples of DummyTextDataset, one at a time."""

    def __init__(self, num_samples, seq_len, vocab_size, seed):
        self.inner = DummyTextDataset(num_samples, seq_len, vocab_size, seed)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


class RandomSamples(Samples):
    """Samples that draw random numbers, as an augmentation does, by each of the generators."""

    def __getitem__(self, index):
        tokens, targets = self.inner[index]
        drawn = [random.randrange(256), np.random.randint(256), torch.randint(256, ())]
        return torch.cat((torch.tensor(drawn), tokens[3:])), targets


class Points(Dataset):
    """Points (4,) with the side of a plane as target."""

    def __init__(self, num_samples, seq_len, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(num_samples, 4, generator=generator)
        self.targets = (self.points.sum(1) > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return self.points[index], self.targets[index]


class Odd(Samples):
    """The token samples of DummyTextDataset in the formats that users bring.

    Args:
        kind: Format of the samples.
        odd: Index of the first sample with that format; the samples before are pairs.
    """

    def __init__(self, num_samples, seq_len, vocab_size, seed, kind, odd=0):
        super().__init__(num_samples, seq_len, vocab_size, seed)
        self.kind, self.odd = kind, odd

    def __getitem__(self, index):
        tokens, targets = self.inner[index]
        if index < self.odd:
            return tokens, targets
        ignored = torch.full_like(targets, -100)
        whole = torch.cat((tokens, targets[-1:]))  # (seq_len,)
        listed = whole.tolist()
        return {
            "dict": {"input_ids": whole, "labels": whole.clone()},
            "dict of int32": {
                "input_ids": whole.int(), "labels": whole.int(), "idx": index, "text": "a text",
            },
            "padded": padded([*listed, 0, 0], [1] * len(whole) + [0, 0]),
            "padded left": padded([0, *listed], [0] + [1] * len(whole)),
            "shifted": {"input_ids": tokens, "labels": targets},
            "lists": (tokens.tolist(), targets.tolist()),
            "two dimensions": (tokens[None], targets[None]),
            "int32": (tokens.int(), targets.int()),
            "text": "a text",
            "uneven": (tokens[: 3 + index % 7], targets[: 3 + index % 7]),
            "ignored": (tokens, ignored),
            "some": (tokens, ignored if index % 4 else targets),
        }[self.kind]  # fmt: skip


def padded(tokens, mask):
    return {"input_ids": tokens, "labels": list(tokens), "attention_mask": mask}


class Broken(Samples):
    """The samples of DummyTextDataset, one of which cannot be used.

    Args:
        at: Index of that sample.
        kind: Fault of the sample, such as "raises" or "none".
    """

    def __init__(self, num_samples, seq_len, vocab_size, seed, kind, at=5):
        super().__init__(num_samples, seq_len, vocab_size, seed)
        self.kind, self.at = kind, at

    def __getitem__(self, index):
        tokens, targets = self.inner[index]
        if index != self.at:
            return tokens, targets
        if self.kind == "raises":
            place = (
                "in a worker" if torch.utils.data.get_worker_info() else "in the training process"
            )
            raise ValueError(f"the sample is broken, {place}")
        if self.kind == "cannot be read":
            raise PermissionError(13, "Permission denied", "sample.bin")
        samples: dict[str, Any] = {
            "none": None,
            "short": (tokens[:3], targets[:3]),
            "a target of -1": (tokens, torch.full_like(targets, -1)),
            "a token above the vocabulary": (tokens + 1000, targets),
        }
        return samples[self.kind]


class Endless(IterableDataset):
    """An iterable dataset, whose samples have no index."""

    def __init__(self, **options):
        self.options, self.samples = options, Samples(**options)

    def __iter__(self):
        return iter(self.samples.inner)


def once(**options):
    """Return a generator, which can be read only once."""
    return iter(Endless(**options))


class Exhausted(Endless):
    """A stream whose second pass has no sample, because it returns the same iterator again."""

    def __iter__(self):
        self.first = getattr(self, "first", None) or once(**self.options)
        return self.first


class Stream(Endless):
    """A stream that saves its position and divides itself over its readers."""

    position, first, stride = 0, 0, 1

    def split_by_rank(self, rank, world_size):
        part = Stream(**self.options)
        part.first, part.stride = rank, world_size
        return part

    def __iter__(self):
        while (number := self.first + self.position * self.stride) < len(self.samples):
            self.position += 1
            yield self.samples[number]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Nothing:
    """An object without samples."""

    def __init__(self, **options):
        pass


class DataModule(pl.LightningDataModule):
    """A LightningDataModule as people write them: a random split in `setup`, batches of pairs.

    The first token of a sample is its number. `teardown` prints what this rank has read.

    Args:
        n_loaders: Number of validation loaders.
    """

    def __init__(self, num_samples, batch_size=4, n_loaders=1):
        super().__init__()
        self.save_hyperparameters()
        self.seen, self.stages = [], []

    def prepare_data(self):
        self.is_prepared = True  # Lightning calls this method on the first rank of a node only

    def setup(self, stage):
        self.stages.append(stage)
        n_samples = self.hparams.num_samples
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (n_samples, 17), generator=generator)
        tokens[:, 0] = torch.arange(n_samples)
        samples = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        self.train, self.val = torch.utils.data.random_split(samples, [n_samples - 9, 9])
        self.rank = self.trainer.global_rank  # many modules read the ranks in `setup`

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        loaders = [DataLoader(self.val, 2 + i) for i in range(self.hparams.n_loaders)]
        return loaders if len(loaders) > 1 else loaders[0]

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"tokens": batch[0], "targets": batch[1]}

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch = batch["tokens"], batch["targets"]
        if self.trainer.training:
            self.seen += batch[0][:, 0].tolist()
        return batch

    def teardown(self, stage):
        facts = {"val": sorted(self.val.indices), "seen": self.seen, "stages": self.stages}
        facts["prepared"] = hasattr(self, "is_prepared")
        facts["seed"] = torch.initial_seed()
        print("\ndatamodule", json.dumps(facts), flush=True)


class Rest(IterableDataset):
    """The samples of a set from a number on."""

    def __init__(self, samples, first):
        self.samples, self.first = samples, first

    def __iter__(self):
        return (self.samples[i] for i in range(self.first, len(self.samples)))


class Uneven(DataModule):
    """A DataModule whose ranks validate different numbers of batches."""

    def val_dataloader(self):
        return DataLoader(Rest(self.val, 3 * self.rank), 2)
