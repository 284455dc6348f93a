"""What a user would write: a dataset, a module, parameter groups, and a callback that records."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset

from gptrain.lit import LanguageModel
from gptrain.optim import decay_groups, muon

IGNORED = -100


class Ragged(Dataset):
    """Random tokens. The samples ignore different numbers of targets: means of means are wrong."""

    def __init__(self, num_samples: int, seq_len: int, vocab_size: int, seed: int):
        self.num_samples, self.seq_len, self.vocab_size = num_samples, seq_len, vocab_size
        self.seed = seed

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        targets = tokens[1:].clone()
        targets[: index % 11] = IGNORED
        targets[-(1 + index % 3)] = IGNORED
        return tokens[:-1], targets


class Penalised(LanguageModel):
    """Adds a term to the loss that does not depend on the targets."""

    def __init__(self, *args, penalty: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.penalty = penalty

    def training_step(self, batch):
        vectors = [p for p in self.net.parameters() if p.ndim < 2]
        return self.loss(*batch) + self.penalty * sum(p.square().sum() for p in vectors)


class FirstBlockAdamW(torch.optim.AdamW):
    """AdamW with another learning rate for the parameters of the first block."""

    @classmethod
    def parameter_groups(cls, net, parameters, names, *, first_block_lr: float):
        parameters = list(parameters)
        first = [p for p in parameters if names[p].startswith("blocks.0.")]
        rest = decay_groups(p for p in parameters if not names[p].startswith("blocks.0."))
        return rest + [group | {"lr": first_block_lr} for group in decay_groups(first)]


class Record(pl.Callback):
    """Writes the batches that a rank got, of each step and of a validation."""

    def __init__(self):
        self.steps, self.val = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.steps.append([])
        self.steps[-1].append([part.clone() for part in batch])

    def on_validation_start(self, trainer, module):
        self.val.clear()

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.val.append([part.clone() for part in batch])

    def on_train_end(self, trainer, module):
        path = Path(trainer.default_root_dir) / f"batches-{trainer.global_rank}.pt"
        torch.save({"steps": self.steps, "val": self.val}, path)


class MuonInFp32(pl.Callback):
    """Runs Muon's matrix multiplications in fp32: bf16 would turn rounding into large errors."""

    def setup(self, trainer, module, stage):
        self.native = muon.native_dtype
        muon.native_dtype = lambda device: torch.float32

    def teardown(self, trainer, module, stage):
        muon.native_dtype = self.native
