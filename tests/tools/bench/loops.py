"""The loops of the bench, each in processes of its own.

The specification of a loop has `loop` (a name of LOOPS), `overrides` of the run for gptrain's loop,
and the same options for the other loops: `model`, `batch_size`, `seq_len`, `num_samples`,
`optimizer`, `clip`, `precision`, `compile`, `device`. Each loop imports only what it needs, because
memory is measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.tools.bench.turns import Turns

# B batch, T time, D d_model, V vocab
Spec = dict[str, Any]


def run(spec: Spec, log: Path, connection: Connection) -> None:
    """Run a loop in this process, until the parent is gone."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    device = torch.device(spec["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # identical for all loops
        turns = Turns(connection, torch.cuda.synchronize, torch.cuda.max_memory_allocated)
    else:
        turns = Turns(connection, lambda: None, peak_resident_bytes)
    torch.manual_seed(0)
    LOOPS[spec["loop"]](spec, device, turns)


def tutorial(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Train with the code that multi-GPU tutorials show, from which a user would start.

    All logits are in memory at once, samples are collected one by one, and the optimizer has
    torch's default implementation.
    """
    from torch.utils.data import DataLoader, TensorDataset

    net = TutorialGPT(spec).to(device)
    if spec["compile"] != "none":
        net.compile()
    net = in_ddp(net)
    optimizer = torch.optim.AdamW(net.parameters(), **{**spec["optimizer"], "fused": None})
    text = torch.randint(spec["model"]["vocab_size"], (spec["num_samples"], spec["seq_len"]))
    dataset = TensorDataset(text[:, :-1], text[:, 1:])
    loader = DataLoader(dataset, spec["batch_size"], shuffle=True, drop_last=True)
    train(chain.from_iterable(repeat(loader)), net, optimizer, spec, device, turns)


def bare(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Train gptrain's model, loss, data and optimizer in the plain loop."""
    from gptrain.optim import decay_groups
    from gptrain.parallel.gradients import clip_grad_norm

    net = OurGPT(spec).to(device)
    optimizer = torch.optim.AdamW(decay_groups(net.parameters()), **spec["optimizer"])
    net = in_ddp(net, gradient_as_bucket_view=True)
    train(make_loader(spec, device), net, optimizer, spec, device, turns, clip_grad_norm)


def ours(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Train as train.py does, with one more callback."""
    from lightning.pytorch import Callback

    from gptrain.assemble.run import build
    from gptrain.checkpoints.lock import RunLock
    from tests.command_line import compose_run, unwatched

    class TakeTurns(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            turns.step_done()

    rank = int(os.environ.get("RANK", 0))
    cfg = compose_run(*spec["overrides"])
    with nullcontext() if rank else RunLock(spec["run_dir"]):  # for its checkpoints, if any
        run = build(cfg, unwatched(rank))
        run.trainer.callbacks.append(TakeTurns())
        run.trainer.fit(run.module, datamodule=run.datamodule)


LOOPS = {loop.__name__: loop for loop in (tutorial, bare, ours)}


def train(
    batches: Iterable[tuple[Tensor, Tensor]],
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    spec: Spec,
    device: torch.device,
    turns: Turns,
    clip: Callable[[list[nn.Parameter], float], Any] = clip_grad_norm_,
) -> None:
    """Train in the plain loop, which has no end."""
    parameters = list(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))
    for batch in batches:
        tokens, targets = (part.to(device, non_blocking=True) for part in batch)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled="16" in spec["precision"]):
            loss = net(tokens, targets)  # most such loops keep the loss until the next step
        loss.backward()
        clip(parameters, spec["clip"])
        optimizer.step()
        scheduler.step()
        turns.step_done()


class TutorialGPT(nn.Module):
    """Loss of tokens and targets (B, T) from torch's decoder, whose memory is its own input."""

    def __init__(self, spec: Spec):
        super().__init__()
        sizes, width = spec["model"], spec["model"]["d_model"]
        self.token_embedding = nn.Embedding(sizes["vocab_size"], width)
        self.position_embedding = nn.Embedding(sizes["max_seq_len"], width)
        options = {"dropout": sizes["dropout"], "activation": "gelu", "batch_first": True}
        layer = nn.TransformerDecoderLayer(width, sizes["n_heads"], 4 * width, **options)
        self.decoder = nn.TransformerDecoder(layer, sizes["n_layers"])
        self.head = nn.Linear(width, sizes["vocab_size"])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, D)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        logits = self.head(self.decoder(x, x, tgt_mask=mask, memory_mask=mask))  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OurGPT(nn.Module):
    """The net of the run and its loss in one module, which DistributedDataParallel wraps."""

    def __init__(self, spec: Spec):
        super().__init__()
        from hydra.utils import get_class

        from gptrain.loss import chunked_loss_sum, cross_entropy_in_place
        from gptrain.parallel.activation import apply_compile

        self.net: Any = get_class(spec["net"])(**spec["model"])
        apply_compile(self.net, spec["compile"])
        self.loss: Callable[..., Tensor] = chunked_loss_sum
        if spec["compile"] != "none" and spec["device"] == "cuda":
            compiled = torch.compile(cross_entropy_in_place, fullgraph=True)
            self.loss = partial(chunked_loss_sum, cross_entropy=compiled)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.net.hidden(tokens), self.net.head.weight, targets) / targets.numel()


def make_loader(spec: Spec, device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
    """Return gptrain's data in gptrain's order, without an end."""
    from torch.utils.data import DataLoader

    from gptrain.data import DummyTextDataset, SampleOrder, TrainBatches, collate

    dataset = DummyTextDataset(spec["num_samples"], spec["seq_len"], spec["model"]["vocab_size"])
    rank, world_size = (int(os.environ.get(*key)) for key in (("RANK", 0), ("WORLD_SIZE", 1)))
    order = SampleOrder(len(dataset), 0)
    sampler = TrainBatches(order, spec["batch_size"], 1, rank, world_size, epoch_steps=2**40)
    is_cuda = device.type == "cuda"
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, pin_memory=is_cuda)


def in_ddp(net: nn.Module, **options: Any) -> nn.Module:
    """Wrap the net in DistributedDataParallel if this process is a rank."""
    if "RANK" not in os.environ:
        return net
    device = next(net.parameters()).device.type
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return nn.parallel.DistributedDataParallel(net, **options)


def peak_resident_bytes() -> int:
    """Return the peak memory of this process, with shared libraries, or 0 without /proc."""
    status = Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text() if status.exists() else "")
    return int(match[1]) * 1024 if match else 0
