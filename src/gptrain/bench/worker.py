"""One process of one loop: `python -m gptrain.bench.worker '<spec>'`, started by the bench.

The spec, in JSON: `loop` (a name of LOOPS), `overrides` of the run (for ours), and for the others
what they make of them: `model`, `batch_size`, `seq_len`, `num_samples`, `optimizer`, `clip`,
`precision`, `compile`, `device`. Each loop imports only what it needs: its memory is measured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gptrain.bench.turns import Turns, peak_resident_bytes

Spec = dict[str, Any]
SAVE_EVERY = 10  # steps of ours_saving


def main() -> None:
    spec = json.loads(sys.argv[1])
    device = torch.device(spec["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # for all loops alike
        turns = Turns(
            torch.cuda.synchronize, torch.cuda.max_memory_allocated, torch.cuda.empty_cache
        )
    else:
        turns = Turns(lambda: None, peak_resident_bytes)
    torch.manual_seed(0)
    LOOPS[spec["loop"]](spec, device, turns)


def tutorial(spec: Spec, device: torch.device, turns: Turns) -> None:
    """The tutorial's model and loop."""
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader

    from gptrain.bench.tutorial import RandomText, TutorialGPT, tutorial_loss

    model, options = spec["model"], spec["optimizer"]
    net = TutorialGPT(**model).to(device)
    if is_rank():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), **{**options, "fused": None})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    dataset = RandomText(spec["num_samples"], spec["seq_len"], model["vocab_size"])
    loader = DataLoader(dataset, spec["batch_size"], shuffle=True, drop_last=True)
    while True:
        for tokens, targets in loader:
            tokens, targets = tokens.to(device), targets.to(device)
            optimizer.zero_grad()
            with autocast(spec, device):
                loss = tutorial_loss(net, tokens, targets)
            loss.backward()
            clip_grad_norm_(net.parameters(), spec["clip"])
            optimizer.step()
            scheduler.step()
            turns.step_done()


def bare(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Our model, loss, data and optimizer in a loop of a dozen lines."""
    from gptrain.parallel import clip_grad_norm

    net = WithLoss(spec).to(device)
    optimizer, scheduler = make_optimizer(spec, net)
    if is_rank():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        net = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    parameters = list(net.parameters())
    for tokens, targets in batches(spec, device):
        optimizer.zero_grad()
        with autocast(spec, device):
            loss = net(tokens, targets)
        loss.backward()
        clip_grad_norm(parameters, spec["clip"])
        optimizer.step()
        scheduler.step()
        turns.step_done()


def accelerate(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Accelerate around the same model, loss, data and optimizer."""
    from accelerate import Accelerator

    mixed = "bf16" if "bf16" in spec["precision"] else "fp16" if "16" in spec["precision"] else "no"
    accelerator = Accelerator(mixed_precision=mixed, cpu=device.type == "cpu")
    net = WithLoss(spec)
    optimizer, scheduler = make_optimizer(spec, net)
    net, optimizer = accelerator.prepare(net, optimizer)
    for tokens, targets in batches(spec, accelerator.device):
        loss = net(tokens, targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), spec["clip"])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        turns.step_done()


def ours(spec: Spec, device: torch.device, turns: Turns) -> None:
    """What train.py does, with one callback more."""
    from lightning.pytorch import Callback

    from gptrain.assemble import build
    from gptrain.config import compose_command

    class TakeTurns(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            turns.step_done()

    run = build(compose_command(spec["overrides"]))
    run.trainer.callbacks.append(TakeTurns())
    run.trainer.fit(run.module, datamodule=run.datamodule)


def ours_saving(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Ours with a checkpoint every 10 steps, in the middle of a turn of as many."""
    from gptrain.resilience.lock import RunLock

    turns.left = SAVE_EVERY // 2  # the first turn
    turns.release = None  # its untimed step would move the saves out of the turns
    overrides = [word for word in spec["overrides"] if word != "checkpoint=none"]
    saving = ["checkpoint=every_n_steps", f"checkpoint.every_n_steps={SAVE_EVERY}"]
    with RunLock(spec["run_dir"]):
        ours({**spec, "overrides": [*overrides, *saving]}, device, turns)


def loader(spec: Spec, device: torch.device, turns: Turns) -> None:
    """Batches, and nothing done with them."""
    for _ in batches(spec, device):
        turns.step_done()


def matmul(spec: Spec, device: torch.device, turns: Turns) -> None:
    """The peak that the others' MFU is taken against."""
    from gptrain.lit.perf import measure_matmul

    dtype = torch.bfloat16 if "bf16" in spec["precision"] else torch.float32
    side = 1024 if device.type == "cpu" else 8192
    while True:
        turns.step_done(flops_per_s=measure_matmul(device, dtype, side, seconds=0.3))


LOOPS = {
    "tutorial": tutorial,
    "tutorial_fp32": lambda spec, *rest: tutorial({**spec, "precision": "32-true"}, *rest),
    "bare": bare,
    "accelerate": accelerate,
    "ours": ours,
    "ours_alone": ours,
    "ours_saving": ours_saving,
    "loader": loader,
    "matmul": matmul,
}


class WithLoss(nn.Module):
    """SimpleGPT and its loss as one module, which is what DistributedDataParallel wraps."""

    def __init__(self, spec: Spec):
        super().__init__()
        from gptrain.models import SimpleGPT
        from gptrain.parallel.activation import apply_compile, compiles_loss

        self.net = SimpleGPT(**spec["model"])
        apply_compile(self.net, spec["compile"])
        self.compiles_loss = compiles_loss(spec["compile"], spec["device"])

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        from gptrain.loss import chunked_next_token_loss

        return chunked_next_token_loss(
            self.net.hidden(tokens), self.net.head.weight, targets, compiles=self.compiles_loss
        )


def make_optimizer(spec: Spec, net: nn.Module) -> tuple:
    """Our AdamW and a schedule."""
    from gptrain.optim import decay_groups

    options = dict(spec["optimizer"])
    optimizer = torch.optim.AdamW(decay_groups(net, options.pop("weight_decay")), **options)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def batches(spec: Spec, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Our data, in our order, without an end."""
    from torch.utils.data import DataLoader

    from gptrain.data import DummyTextDataset, SampleOrder, TrainBatches, collate

    dataset = DummyTextDataset(spec["num_samples"], spec["seq_len"], spec["model"]["vocab_size"])
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    order = SampleOrder(len(dataset), 0)
    sampler = TrainBatches(order, spec["batch_size"], 1, rank, world_size, epoch_steps=2**40)
    is_cuda = device.type == "cuda"
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, pin_memory=is_cuda)
    for tokens, targets in loader:
        yield tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def autocast(spec: Spec, device: torch.device) -> torch.autocast | nullcontext:
    if "16" not in spec["precision"]:
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 100)


def is_rank() -> bool:
    return "RANK" in os.environ


if __name__ == "__main__":
    main()
