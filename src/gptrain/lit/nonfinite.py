"""The rule that refuses steps whose gradients are not finite, and the search for the cause.

A value is called finite if it is neither NaN nor infinite.
"""

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gptrain.checkpoints.rng import capture, restore
from gptrain.checkpoints.status import NonFiniteError
from gptrain.lit.decisions import DecidedStep, StepRule
from gptrain.lit.lightning import data_of, strategy_of, without_logging
from gptrain.lit.strategies.base import LightningStrategy
from gptrain.parallel.mesh import gather

# Prefixes that compile, activation checkpointing and FSDP add to the names of modules.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
GRADIENT = "the gradient"
NOT_REPRODUCED = (
    "the step was finite when it was repeated: it uses random numbers of another generator, or the "
    "hardware is faulty"
)
OVERFLOW = "the scaled gradients overflow fp16; try trainer.precision=bf16-mixed"


class NonFiniteRule(StepRule):
    """Rule that flags a step if a gradient on any rank is NaN or infinite.

    A loss that is NaN or infinite normally has such gradients. The rule reads only the norm of all
    gradients, which is not finite if any gradient on any rank is not finite.

    Args:
        reaction: "stop" ends the run at the flagged step. "skip" logs the step and continues
            without its update.

    Attributes:
        not_reproduced: Explanation for the error message if all values are finite when the
            micro-step is repeated.
    """

    not_reproduced = NOT_REPRODUCED

    def __init__(self, reaction: Literal["stop", "skip"]):
        self.reaction = reaction

    def flag(self, strategy: LightningStrategy) -> Tensor:
        """Return whether the gradient norm of the step is NaN or infinite, without waiting for it.

        The result is a boolean scalar tensor on the device. The norm, and so the result, is
        identical on all ranks that take the step together.

        Args:
            strategy: Strategy of the run, whose `clip` has measured the norm.
        """
        assert strategy.grad_norm is not None  # `clip` has measured it
        return strategy.grad_norm.isfinite().logical_not()

    def describe(self, trainer: Trainer, step: DecidedStep) -> NonFiniteError:
        """Return an error that names the rank, the samples and the first value that is not finite.

        To find this value, the first micro-step with a loss that is not finite is repeated, or the
        first micro-step of the step if all losses are finite. All ranks that take the step together
        must call this method, because they gather their losses and repeat the micro-step together.

        Args:
            trainer: Trainer of the run.
            step: Step that was flagged.
        """
        losses = [float(loss) for loss in step.micro_losses]
        # Rank and losses of all micro-steps, for each rank that takes part in this step.
        group = strategy_of(trainer).parallel.step_group
        rank_losses = gather((trainer.global_rank, losses), group)
        rank = None  # first rank with a non-finite loss
        micro_step = 0  # first micro-step of that rank with a non-finite loss
        for loss_rank, losses in rank_losses:
            is_finite = [math.isfinite(loss) for loss in losses]
            if not all(is_finite):
                rank = loss_rank
                micro_step = is_finite.index(False)
                break
        place = find_first(trainer, step, micro_step) or self.not_reproduced
        samples = data_of(trainer).step_samples(step.step, rank)
        return NonFiniteError(step.step, rank, samples, place)


class LossScalerRule(NonFiniteRule):
    """Rule that counts the steps that the loss scaler of precision 16-mixed skips.

    The scaler itself skips a step whose scaled gradients are not finite, and halves its scale. Some
    such steps are normal and are not logged. If `max_skips` steps in a row are skipped, no scale
    helps, and the run ends.
    """

    refuses = False
    logs_skips = False
    not_reproduced = OVERFLOW  # the repeated step does not scale its loss

    def __init__(self) -> None:
        super().__init__("skip")


def find_first(trainer: Trainer, step: DecidedStep, micro_step: int) -> str:
    """Repeat a micro-step of a refused step, and describe which value in it is first not finite.

    The micro-step is repeated with the same batch and the same random numbers. Parameters are
    checked first, then the inputs and outputs of modules in the order of the forward pass, then the
    loss, then the gradients in the order of the backward pass. Parameters, gradients, random
    generators and logged values are left unchanged: the next step may have computed its gradients
    already. An error of the repetition is not raised but described.

    All ranks that take the step together must call this function. In a pipeline each rank checks
    its own stages.

    Args:
        trainer: Trainer that is fitting. Its optimizer has not changed a parameter since the step.
        step: Step that was refused, with the arguments of its micro-steps.
        micro_step: Index of the micro-step within the optimizer step.

    Returns:
        A phrase such as `first not finite in blocks.1.mlp`, with the rank if there are several. It
        is identical on all ranks that call this function, and empty if all values are finite.
    """
    strategy = strategy_of(trainer)
    args, kwargs, rng_state = step.micro_steps[micro_step]
    rng_state_now = capture()
    gradients = [(p, p.grad) for p in trainer.lightning_module.parameters()]
    finding = ""
    try:
        restore(rng_state)
        finding = _repeat(trainer.lightning_module, strategy, args, kwargs)
    except Exception as error:  # the non-finite step is reported, not an error of its repetition
        finding = f"not repeated: {type(error).__name__}"
    finally:
        restore(rng_state_now)
        for parameter, gradient in gradients:
            parameter.grad = gradient
    ranks = gather((trainer.global_rank, finding), strategy.parallel.step_group)
    findings = [(rank, text) for rank, text in ranks if text]
    if not findings:
        return ""
    # A forward pass comes before every backward pass, so gradients come last.
    rank, text = min(findings, key=lambda item: (item[1].startswith(GRADIENT), item[0]))
    return text if len(ranks) == 1 else f"{text} (rank {rank})"


def _repeat(module: LightningModule, strategy: LightningStrategy, args: Any, kwargs: Any) -> str:
    """Run training_step and the backward pass again, and describe which value is first not finite.

    All ranks that take the step together must call this function. The gradients of the parameters
    are replaced, and the caller restores them.

    Args:
        module: LightningModule of the run.
        strategy: Strategy of the run.
        args: Arguments of training_step.
        kwargs: Keyword arguments of training_step.

    Returns:
        A phrase about this rank, or an empty string if all values are finite.
    """
    net = getattr(module, "net", None)
    watched: nn.Module = net if isinstance(net, nn.Module) else module
    for name, parameter in watched.named_parameters():
        if not _is_finite([parameter]):
            return f"first not finite in the parameter {_without_wrappers(name)}"
    findings: list[str] = []
    forward_order: dict[nn.Module, int] = {}
    for optimizer in strategy.optimizers:
        optimizer.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code skips hooks
        stack.enter_context(without_logging(module))
        stack.enter_context(strategy.precision_plugin.train_step_context())
        for name, part in watched.named_modules():
            if part is watched and name == "":
                continue
            for handle in _watch(part, _without_wrappers(name), findings, forward_order):
                stack.callback(handle.remove)
        output: Any = module.training_step(*args, **kwargs)
        loss = output["loss"] if isinstance(output, dict) else output
        if findings:
            return f"first not finite in {findings[0]}"
        if not _is_finite([loss]):
            return "first not finite in the loss; all layers are finite"
    loss.backward()
    nonfinite = [name for name, p in watched.named_parameters() if not _is_finite([p.grad])]
    if not nonfinite:
        return ""

    def position(name: str) -> int:
        """Return when a parameter's module ran in the forward pass, or -1 if it did not run."""
        owner = watched.get_submodule(name.rpartition(".")[0])
        return forward_order.get(owner, -1)

    # The backward pass begins with the module that came last in the forward pass.
    name = max(nonfinite, key=position)
    return f"{GRADIENT} is first not finite in {_without_wrappers(name)}"


def _watch(
    part: nn.Module, name: str, findings: list[str], forward_order: dict[nn.Module, int]
) -> list[RemovableHandle]:
    """Register hooks on a module that record when it runs and whether its values are finite.

    Args:
        part: Module to watch.
        name: Name of the module for the message.
        findings: List that all watched modules share. The first of them whose input or output is
            not finite adds a description to it.
        forward_order: Dict that all watched modules share. A module adds itself, with the number of
            modules before it, when its forward pass ends.

    Returns:
        Handles that remove the hooks.
    """

    def before(_: nn.Module, inputs: Any) -> None:
        """Add the module to `findings` if an input is the first value that is not finite."""
        if not findings and not _is_finite(inputs):
            findings.append(f"the input of {name}")

    def after(module: nn.Module, _: Any, outputs: Any) -> None:
        """Record that the module has run, and check its outputs like the inputs."""
        forward_order[module] = len(forward_order)
        if not findings and not _is_finite(outputs):
            findings.append(name)

    return [part.register_forward_pre_hook(before), part.register_forward_hook(after)]


def _is_finite(values: Any) -> bool:
    """Return whether all tensors in nested lists and dicts are finite.

    A DTensor is checked by its local shard. Values that are no tensors are ignored.
    """
    leaves: Iterable[Any] = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    local = (leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves)
    return all(bool(tensor.detach().isfinite().all()) for tensor in local)


def _without_wrappers(name: str) -> str:
    """Return the name of a module or parameter without the prefixes in WRAPPERS."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
