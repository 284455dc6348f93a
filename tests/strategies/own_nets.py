"""User nets that keep the full contract, and user nets that break one rule each."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Attention that computes the number of heads from the width of q, k and v."""

    is_causal = True

    def __init__(self, width, n_heads):
        super().__init__()
        self.n_heads, self.head_width = n_heads, width // n_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def project(self, x):
        parts = (self.q, self.k, self.v)
        return [part(x).unflatten(-1, (-1, self.head_width)) for part in parts]

    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in self.project(x))  # (B, H, T, K)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class CountedHeads(Attention):
    """Attention that stores the number of heads on the module, as is usual."""

    def project(self, x):
        parts = (self.q, self.k, self.v)
        return [part(x).view(*x.shape[:2], self.n_heads, -1) for part in parts]


class FusedProjection(Attention):
    """Attention with one fused layer for q, k and v."""

    def __init__(self, width, n_heads):
        super().__init__(width, n_heads)
        del self.q, self.k, self.v
        self.qkv = nn.Linear(width, 3 * width)

    def project(self, x):
        return [part.unflatten(-1, (-1, self.head_width)) for part in self.qkv(x).chunk(3, -1)]


class Block(nn.Module):
    def __init__(self, width, n_heads, attention, dropout):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention(width, n_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class OnlyChain(nn.Module):
    """A net that keeps every rule and has no `hidden`; its head starts with zeros."""

    attention: ClassVar[type] = Attention
    block: ClassVar[type[Block]] = Block
    tensor_plan: ClassVar[dict] = {
        "embedding": "vocab_embedding",
        "blocks.*.norm_[12]": "sequence",
        "blocks.*.attention.[qkv]": "colwise",
        "blocks.*.attention.qkv": "colwise",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "norm": "sequence",
        "head": "vocab_head",
    }

    def __init__(self, vocab_size=61, width=32, n_heads=4, n_layers=2, dropout=0.1):
        super().__init__()
        self.n_heads = n_heads
        self.embedding = nn.Embedding(vocab_size, width)
        layers = (self.block(width, n_heads, self.attention, dropout) for _ in range(n_layers))
        self.blocks, self.norm = nn.ModuleList(layers), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        nn.init.zeros_(self.head.weight)

    def embed(self, tokens):
        return self.embedding(tokens)

    def body(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.head(self.body(tokens))


class Chain(OnlyChain):
    """A chain without dropout, whose head does not start with zeros."""

    def __init__(self, vocab_size=64):
        super().__init__(vocab_size, dropout=0.0)
        nn.init.normal_(self.head.weight)


class AllPositions(Attention):
    is_causal = False


class SeesAll(Chain):
    """A net without a causal mask and without positions."""

    attention = AllPositions


class OwnNet(OnlyChain):
    """A net whose loss is computed from `hidden` and the head."""

    def hidden(self, tokens):
        return self.body(tokens)


class CountsHeads(OwnNet):
    attention = CountedHeads


class Windows(CountsHeads):
    """A net that also takes sequences of whole windows only."""

    def embed(self, tokens):
        return super().embed(tokens.unflatten(1, (-1, 8))).flatten(1, 2)


class Fused(OwnNet):
    attention = FusedProjection


class HalfLogits(OwnNet):
    def forward(self, tokens):
        return 0.5 * super().forward(tokens)


class PairInTraining(HalfLogits):
    def forward(self, tokens):
        return (super().forward(tokens), None) if self.training else super().forward(tokens)


class CapsInTraining(OwnNet):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return 0.3 * torch.tanh(logits / 0.3) if self.training else logits


class DroppingHead(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


class DropsInHead(OwnNet):
    def __init__(self):
        super().__init__()
        self.head = DroppingHead(self.head.in_features, self.head.out_features, bias=False)


class ScaledByBatch(OwnNet):
    """A net whose logits depend a little on the size of the batch, as kernels do."""

    def forward(self, tokens):
        return (1 + 1e-3 / len(tokens)) * super().forward(tokens)


class DetachedEmbedding(OwnNet):
    """A net whose `hidden` does not train its weights, which `forward` does."""

    def hidden(self, tokens):
        return self.body(tokens).detach()


class NotFiniteBackward(OwnNet):
    """A net whose `hidden` has gradients that are not numbers, which `forward` has not."""

    def hidden(self, tokens):
        x = super().hidden(tokens)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * torch.nan)
        return x


class ReadsValues(OwnNet):
    """A net that draws from the CPU's generator and then needs values, so it fails on meta."""

    def __init__(self):
        torch.rand(3, device="cpu")
        super().__init__()
        self.factor = self.embedding.weight.sum().item()
        self.head.weight = self.embedding.weight


class DrawsOnCPU(OwnNet):
    """A net with a buffer that draws from the CPU's generator, also on the meta device."""

    def __init__(self):
        factor = torch.rand((), device="cpu").item()
        super().__init__()
        self.factor = factor


class OnlyFloat32(HalfLogits):
    """A net that cannot compute in float64."""

    def forward(self, tokens):
        if self.norm.weight.dtype == torch.float64:
            raise TypeError("the kernel takes float32")
        return super().forward(tokens)


class SoftCapped(OnlyChain):
    def forward(self, tokens):
        return 3 * torch.tanh(super().forward(tokens) / 3)


class ResidualOfEmbedding(OnlyChain):
    def forward(self, tokens):
        return self.head(self.body(tokens) + self.embed(tokens))


class ScaledBlock(Block):
    """A block whose scale acts on a slice of the sequence, so its gradient is a partial sum."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        gain = getattr(self.gain, "to_local", lambda: self.gain)()
        return gain * super().forward(x)


class UnplannedScale(OwnNet):
    block = ScaledBlock


class UnplannedEmbedding(OwnNet):
    tensor_plan: ClassVar[dict] = {
        name: role for name, role in OwnNet.tensor_plan.items() if name != "embedding"
    }


class UnknownRole(OwnNet):
    tensor_plan: ClassVar[dict] = {**OwnNet.tensor_plan, "blocks.*.up": "diagonal"}


class BiasedHead(OwnNet):
    """A net whose head has a bias."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.head = nn.Linear(self.norm.normalized_shape[0], self.head.out_features)


class DoublingLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ScalesInLayer(OwnNet):
    """A net with a layer whose own forward the role of the layer would replace."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        width = self.norm.normalized_shape[0]
        self.blocks[1].down = DoublingLinear(4 * width, width)
