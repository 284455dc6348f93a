"""A callback that records what each rank of a run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "send")


class Record(pl.Callback):
    """Records what each rank of a run does, in `record-<rank>.pt` in the run folder.

    The bytes sent are those of the second step, as one dict for each of its micro-steps.
    """

    def __init__(self):
        self.seen = {
            "places": [],  # (epoch, step) of every micro-step
            "samples": [],  # sample indices of this rank in every step
            "validated": [],  # steps
            "sent": [],
            "calls": [],
        }
        self.looks: Counts | None = None

    def setup(self, trainer, module, stage):
        self.looks = None
        self.path = Path(trainer.default_root_dir) / f"record-{trainer.global_rank}.pt"

    def on_train_start(self, trainer, module):
        net, seen = module.net, self.seen
        seen["static_graph"] = getattr(trainer.strategy.model, "static_graph", None)
        peak = next(c.speed.peak for c in trainer.callbacks if hasattr(c, "speed"))
        if peak is not None:  # only rank 0 has a peak
            seen["peak"] = peak[0]
        dropouts = [part for part in net.modules() if isinstance(part, nn.Dropout) and part.p > 0]
        for part in dropouts[:1]:
            part.register_forward_hook(self._note_mask)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen["places"].append((trainer.current_epoch, trainer.global_step))
        if batch_idx % trainer.accumulate_grad_batches == 0:
            data = trainer.datamodule
            samples = data.batches.step_samples(trainer.global_step)[:, data.rank]
            self.seen["samples"].append(samples.ravel().tolist())
        if trainer.global_step == 1:
            self.looks = Counts()
            self.looks.__enter__()

    def on_after_backward(self, trainer, module):
        if self.looks is not None:
            self.looks.__exit__(None, None, None)
            self.seen["sent"].append(dict(self.looks.n_bytes))
            self.seen["calls"].append(dict(self.looks.calls))
            self.looks = None

    def on_validation_start(self, trainer, module):
        self.seen["validated"].append(trainer.global_step)

    def on_train_end(self, trainer, module):
        torch.save(self.seen, self.path)

    def _note_mask(self, module, inputs, output):
        if self.looks is not None:
            self.seen.setdefault("mask", (output == 0).flatten())


class Counts(TorchDispatchMode):
    """Counts the bytes that this rank sends, and the calls, by kind of collective.

    Collectives count as rings. For a tensor of b bytes on n ranks, a rank sends (n-1)/n b in an
    all-gather, a reduce-scatter or an all-to-all, as much on average in a broadcast, and 2 (n-1)/n
    b in an all-reduce (Patarasuk & Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). The collectives of
    DDP, FSDP and DTensor all pass through torch's dispatcher.
    """

    def __init__(self):
        super().__init__()
        self.n_bytes = dict.fromkeys(COLLECTIVES, 0.0)
        self.calls = dict.fromkeys(COLLECTIVES, 0)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # the dispatch of DTensor calls collectives of plain tensors
        out = op(*args, **(kwargs or {}))
        if op.namespace in ("c10d", "_c10d_functional"):
            name = op._opname.strip("_").replace("_", "")
            for kind in COLLECTIVES:
                if name.startswith(kind):
                    self.n_bytes[kind] += sent_bytes(kind, args, out)
                    self.calls[kind] += 1
        return out


def sent_bytes(kind: str, args: Any, out: Any) -> float:
    """Return the bytes that a rank sends in one collective.

    Args:
        kind: Kind of the collective, one of COLLECTIVES, such as `allreduce`.
        args: Arguments of the operation. Operations of `c10d` change their arguments in place.
        out: Result of the operation. Operations of `_c10d_functional` return the new tensor.
    """
    if kind in ("allgather", "reducescatter"):
        # One tensor is the full tensor, the other the shard of a rank: (n-1)/n b is the difference.
        first, second = args[:2] if isinstance(args[1], Tensor) else (args[0], out)
        return abs(first.nbytes - second.nbytes)
    tensors = args[0] if isinstance(args[0], list) else [args[0]]
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    if kind == "send":
        return n_bytes
    names = [argument for argument in args if isinstance(argument, str)]
    if names:  # `_c10d_functional`: the name of the group is the last string
        size = dist.distributed_c10d._resolve_process_group(names[-1]).size()
    else:  # the group is the first object of C++
        group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
        size = dist.ProcessGroup.unbox(group).size()
    return (2 if kind == "allreduce" else 1) * n_bytes * (size - 1) / size
