"""Parts of the interrupted runs: the callback that stops them, and parts that have a state."""

from __future__ import annotations

import json
import os
import random
import resource
import signal

import numpy as np
import torch
from lightning.pytorch import Callback
from torch.utils.data import Dataset, IterableDataset

from gptrain.lit import LanguageModel

STOP = "TEST_STOP"  # environment variable with the options of Stop


class Stop(Callback):
    """Stop the run in a hook of a step, exactly, and not after some time.

    The environment says how, so that the words of a run are those of the run that is not stopped:
    `how` is the name of a signal that a rank sends to itself, `error` for an exception, `nan` for
    gradients that are not numbers, or `full` for a disk on which no file may have more than 20,000
    bytes. `at` is the name of a hook, or `in_save` for the moment in which the file of a checkpoint
    is written. `step` is the number of steps that are done, and `rank` the rank that does it.
    """

    def __init__(self):
        self.is_done = False
        if options := os.environ.get(STOP):
            self.how, at, self.step, self.rank = json.loads(options)
            if at == "in_save":
                self.on_save_checkpoint = self.add_to_save
            else:
                setattr(self, at, self.stop)

    def is_due(self, trainer):
        return (trainer.global_step, trainer.global_rank) == (self.step, self.rank)

    def stop(self, trainer, module=None, loss=None, *_):
        if self.is_due(trainer) and not self.is_done:
            self.is_done = True
            if self.how == "nan":
                loss.register_hook(lambda gradient: gradient * float("nan"))
            else:
                self.act()

    def add_to_save(self, trainer, module, checkpoint):
        if self.is_due(trainer):
            checkpoint["stop"] = WhenWritten(self.act)

    def act(self):
        if self.how == "error":
            raise RuntimeError("the run was to end here")
        if self.how == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        else:
            os.kill(os.getpid(), signal.Signals[self.how])


class WhenWritten:
    """An object that calls a function when it is pickled."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        self.function()
        return int, ()


class Draws(Callback):
    """Draws random numbers in most hooks, logs them and keeps a state."""

    def __init__(self):
        self.n_drawn, self.mean = 0, torch.zeros(2)

    def draw(self, *_):
        self.n_drawn += 1
        self.mean = 0.5 * self.mean + torch.rand(2)

    on_train_batch_start = on_train_epoch_start = on_validation_batch_end = draw

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.draw()
        self.log("drawn", self.mean[0])

    def state_dict(self):
        return {"n_drawn": self.n_drawn, "mean": self.mean}

    def load_state_dict(self, state):
        self.n_drawn, self.mean = state["n_drawn"], state["mean"]


class Scales(Callback):
    """Multiplies the loss and the gradients of some steps by a factor, which may be infinite."""

    def __init__(self, steps: list[int], factor: float):
        self.steps, self.factor = steps, factor

    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step in self.steps:
            loss.data.mul_(self.factor)
            loss.register_hook(lambda gradient: gradient * self.factor)


class Freezes(Callback):
    """Freezes the first block after the third step, once."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            module.net.blocks[0].requires_grad_(False)


class Samples(Dataset):
    """Random tokens, the same for each number of a sample."""

    def __init__(self, num_samples, seq_len, vocab_size=256, seed=0):
        self.num_samples, self.seq_len = num_samples, seq_len
        self.vocab_size, self.seed = vocab_size, seed

    def __len__(self):
        return self.num_samples

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


class RandomSamples(Samples):
    """Samples that draw random numbers, as an augmentation does, by each of the generators."""

    def __getitem__(self, number):
        tokens, targets = super().__getitem__(number)
        tokens = tokens.clone()
        tokens[:3] = torch.tensor(
            [random.randrange(256), np.random.randint(256), torch.randint(256, ())]
        )
        return tokens, targets


class Stream(IterableDataset):
    """A stream of samples that saves its position and divides itself over its readers."""

    def __init__(self, first=0, stride=1, **options):
        self.options, self.samples = options, Samples(**options)
        self.position, self.first, self.stride = 0, first, stride

    def split_by_rank(self, rank, world_size):
        return Stream(rank, world_size, **self.options)

    def __iter__(self):
        while (number := self.first + self.position * self.stride) < len(self.samples):
            self.position += 1
            yield self.samples[number]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class OwnModule(LanguageModel):
    """A module with a parameter and a buffer outside the net, an optimizer and a schedule."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("n_seen", torch.zeros(()))

    def training_step(self, batch):
        self.n_seen += 1
        return self.loss(*batch) + (self.gain - 0.5).square().sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]
