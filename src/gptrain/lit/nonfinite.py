"""Where a step stopped being finite: its forward and backward pass once more, watched by hooks."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from gptrain.checkpoints.rng import capture, restore
from gptrain.lit.callbacks.vote import gather
from gptrain.lit.lightning import strategy_of, without_logging

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
AGAIN = "a second try was finite: random numbers that gptrain does not know, or faulty hardware"


def find_first(trainer: Trainer, micro_step: int) -> str:
    """Return what was first not finite in a micro-step of the step that has just failed.

    The micro-step is repeated with the same batch and the same random numbers; all ranks that take
    the step together must call it, since the net may be partitioned over them. Parameters come
    first, then outputs of modules in their order, then gradients in theirs. Gradients are dropped.
    Under a pipeline a rank sees its own stages, and the first stage that is not finite is named.
    """
    strategy = strategy_of(trainer)
    args, kwargs, rng = strategy.micro_steps[micro_step]
    now, found = capture(), ""
    try:
        restore(rng)
        found = _repeat(trainer.lightning_module, strategy, args, kwargs)
    except Exception as error:  # what is looked for is the cause, not one error more
        found = f"not repeated: {type(error).__name__}"
    finally:
        restore(now)
    ranks = gather((trainer.global_rank, found), strategy.parallel.step_group)
    told = [(rank, text) for rank, text in ranks if text]
    if not told:
        return AGAIN
    rank, text = min(told, key=lambda one: (one[1].startswith("the gradient"), one[0]))
    return text if len(ranks) == 1 else f"{text} (rank {rank})"


def _repeat(module: LightningModule, strategy: Any, args: Any, kwargs: Any) -> str:
    """Return what is first not finite on this rank, or an empty string."""
    net = getattr(module, "net", None)
    watched: nn.Module = net if isinstance(net, nn.Module) else module
    for name, parameter in watched.named_parameters():
        if not _is_finite([parameter]):
            return f"first not finite in the parameter {_clean(name)}"
    first: list[str] = []
    order: dict[nn.Module, int] = {}
    for optimizer in strategy.optimizers:
        optimizer.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks are not compiled
        stack.enter_context(without_logging(module))
        stack.enter_context(strategy.precision_plugin.train_step_context())
        for name, part in watched.named_modules():
            if part is watched and name == "":
                continue
            for handle in _watch(part, _clean(name), first, order):
                stack.callback(handle.remove)
        output: Any = module.training_step(*args, **kwargs)
        loss = output["loss"] if isinstance(output, dict) else output
        if first:
            return f"first not finite in {first[0]}"
        if not _is_finite([loss]):
            return "first not finite in the loss; all layers are finite"
    loss.backward()
    bad = [(n, p) for n, p in watched.named_parameters() if not _is_finite([p.grad])]
    if not bad:
        return ""

    def place(entry: tuple[str, Any]) -> int:
        owner = watched.get_submodule(entry[0].rpartition(".")[0])
        return order.get(owner, -1)

    name = max(bad, key=place)[0]  # a backward pass begins at the last layer
    return f"the gradient is first not finite in {_clean(name)}"


def _watch(part: nn.Module, name: str, first: list[str], order: dict[nn.Module, int]) -> list[Any]:
    """Note the module's name if its input, or its output, is the first that is not finite."""

    def before(_: nn.Module, inputs: Any) -> None:
        if not first and not _is_finite(inputs):
            first.append(f"the input of {name}")

    def after(made: nn.Module, _: Any, outputs: Any) -> None:
        order[made] = len(order)
        if not first and not _is_finite(outputs):
            first.append(name)

    return [part.register_forward_pre_hook(before), part.register_forward_hook(after)]


def _is_finite(values: Any) -> bool:
    leaves: Iterable[Any] = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    local = (one.to_local() if isinstance(one, DTensor) else one for one in leaves)
    return all(bool(one.detach().isfinite().all()) for one in local)


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
