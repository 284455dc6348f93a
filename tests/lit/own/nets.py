"""Nets of a user's own."""

from __future__ import annotations

import torch
from torch import nn

from gptrain.models import SimpleGPT


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank: its names are not the base's."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden):
        return self.base(hidden) + self.up(self.down(hidden))


class LoRA(nn.Module):
    """A GPT whose blocks' last layers are wrapped; all else keeps its name."""

    def __init__(self, rank=2, **options):
        super().__init__()
        gpt = SimpleGPT(**options)
        for parameter in gpt.parameters():
            parameter.requires_grad_(False)
        for block in gpt.blocks:
            for name, layer in block.named_children():
                if isinstance(layer, nn.Linear):
                    setattr(block, name, LowRank(layer, rank))
                for inner_name, inner in layer.named_children():
                    if isinstance(inner, nn.Linear):
                        setattr(layer, inner_name, LowRank(inner, rank))
        for name, child in gpt.named_children():
            setattr(self, name, child)
        self.__dict__["gpt"] = gpt

    def forward(self, tokens):
        return self.gpt(tokens)


class Tied(nn.Module):
    """No contract but tokens -> logits."""

    def __init__(self, vocab_size, width=8):
        super().__init__()
        self.table, self.out = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)

    def forward(self, tokens):
        return self.out(self.table(tokens))


class SAM(torch.optim.Optimizer):
    """Steps with the gradients at a worse point nearby: it calls the closure twice."""

    def __init__(self, params, lr=0.01, rho=0.05, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "rho": rho, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        groups = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        moves = [g["rho"] * p.grad / (p.grad.norm() + 1e-12) for g, p in groups]
        for (_, p), move in zip(groups, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for (g, p), move in zip(groups, moves, strict=True):
            p.sub_(move)
            p.sub_(g["lr"] * p.grad)
        return loss
