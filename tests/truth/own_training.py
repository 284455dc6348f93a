"""Nets and modules of other people whose training is not that of a plain chain of blocks."""

from typing import ClassVar

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import dropout
from torchmetrics import SumMetric

from gptrain.lit import LanguageModel

WIDTH = 16


class Block(nn.Module):
    """Add the mean of the positions so far, through a small MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        y = y.cumsum(1) / torch.arange(1, y.shape[1] + 1, device=y.device)[:, None]
        return x + self.down(self.up(y).relu())


class Chain(nn.Module):
    """A net without `hidden`: embedding, two blocks, norm and head."""

    block: ClassVar[type[nn.Module]] = Block

    def __init__(self, vocab_size=64):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)

    def embed(self, tokens):
        return self.embedding(tokens)

    def before_blocks(self, x):
        return x

    def before_head(self, x):
        return x

    def after_head(self, logits):
        return logits

    def body(self, tokens):
        x = self.before_blocks(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.after_head(self.head(self.before_head(self.body(tokens))))


# What `forward` does in training only


class CapsLogits(Chain):
    def after_head(self, logits):
        return 0.3 * torch.tanh(logits / 0.3) if self.training else logits


class NoisyEmbedding(Chain):
    def before_blocks(self, x):
        return x + 0.5 * torch.randn_like(x) if self.training else x


class SkipsBlocks(Chain):
    def body(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if not self.training or torch.rand(()) > 0.9:
                x = block(x)
        return self.norm(x)


class SharesActivation(Chain):
    """A chain in which one layer without parameters stands twice."""

    def __init__(self, vocab_size=64):
        super().__init__(vocab_size)
        shared = nn.Tanh()
        self.blocks = nn.ModuleList(m for _ in range(4) for m in (Block(), shared))


class DroppingHead(nn.Linear):
    def forward(self, x):
        return super().forward(dropout(x, 0.5, self.training))


class DropsInHead(Chain):
    def __init__(self, vocab_size=64):
        super().__init__(vocab_size)
        self.head = DroppingHead(WIDTH, vocab_size, bias=False)


class WithHidden(Chain):
    """The same net with `hidden`, which leaves out what `forward` does in training only."""

    def hidden(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class CapsLogitsParts(CapsLogits, WithHidden): ...


class NoisyEmbeddingParts(NoisyEmbedding, WithHidden): ...


class DropsInHeadParts(DropsInHead, WithHidden): ...


# Buffers that a block changes, and reads


class Counts(Block):
    """The block opens a gate with each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return x + torch.sin(self.seen / 4 * super().forward(x))


class Replaces(Counts):
    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1
        return x + torch.sin(self.seen / 4 * Block.forward(self, x))


class Normalized(Block):
    """The block normalizes over the batch, which changes running averages."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.batch_norm(super().forward(x).mT).mT


class BatchNormNet(Chain):
    block = Normalized


class ReplacesNet(Chain):
    block = Replaces


# Parameters that a batch may not use


class Experts(Block):
    """Experts of two sizes; each position goes to one of them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 + i % 2), nn.Linear(4 + i % 2, WIDTH))
            for i in range(12)
        )

    def forward(self, x):
        x = super().forward(x)
        choice = x.detach().argmax(-1) % len(self.experts)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (rows := choice == i).any():
                y[rows] = expert(x[rows])
        return x + y


class MixtureOfExperts(Chain):
    block = Experts


class OwnScales(LanguageModel):
    """Two scales outside of the net, of which a batch uses one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(3))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        scale = self.scales[int(tokens[0, 0]) % 2]
        logits = scale * self.net(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Sums


class Sums(LanguageModel):
    """Count targets in each way in which Lightning and torchmetrics sum over ranks."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metric, self.val_metric = SumMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        n_targets = float(batch[1].numel())
        self.log("train/n", n_targets, reduce_fx="sum", sync_dist=True, on_step=True)
        self.metric.update(n_targets)
        self.log("train/metric", self.metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        n_targets = float(batch[1].numel())
        self.log("val/n", n_targets, reduce_fx="sum", sync_dist=True)
        self.val_metric.update(n_targets)
        self.log("val/metric", self.val_metric)
        super().validation_step(batch, batch_idx)


class CountsBatches(pl.Callback):
    """A callback that sums with a metric of its own."""

    def __init__(self):
        self.metric = SumMetric()

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.metric.update(float(batch[1].numel()))

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/callback", self.metric.compute())


# A net that sees all positions


class Attention(nn.Module):
    exchange = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 8)) for part in (self.q, self.k, self.v))
        if self.exchange is not None:
            q, k, v = self.exchange.to_heads(q, k, v)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        if self.exchange is not None:
            y = self.exchange.to_positions(y)
        return self.out(y.flatten(2))


class SeesAllBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class SeesAll(Chain):
    """A net without a causal mask and without positions."""

    block = SeesAllBlock
    n_heads = 2
    context_plan = ("blocks.*.attention",)
    tensor_plan: ClassVar[dict[str, str]] = {
        "embedding": "vocab_embedding",
        "blocks.*.norm": "sequence",
        "blocks.*.attention.[qkv]": "colwise",
        "blocks.*.attention.out": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }

    def forward(self, tokens, layout=None):
        return super().forward(tokens)
