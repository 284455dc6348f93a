"""The rule that refuses steps whose gradients are not finite, and the search for the cause.

A value is called finite if it is neither NaN nor infinite.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
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
LOSS = "first not finite in the loss"
NOT_REPEATED = "not repeated"
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
        # Rank and losses of all micro-steps, for each rank.
        rank_losses = gather((trainer.global_rank, losses))
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
    already. An error of the repetition is not raised but described. The ranks agree after each of
    these parts, and leave out the following ones if any rank has found something.

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
    repetition = _Repetition(trainer.lightning_module, strategy)
    parts = (
        repetition.check_parameters,
        partial(repetition.run_forward, args, kwargs),
        repetition.run_backward,
    )
    try:
        restore(rng_state)
        for part in parts:
            # A rank that alone has found something must not leave the others in the next part,
            # which may communicate, as the backward pass under FSDP does.
            finding = _first_of_ranks(_find_in(part), trainer.global_rank)
            if finding:
                return finding
        return ""
    finally:
        restore(rng_state_now)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _find_in(part: Callable[[], str]) -> str:
    """Run a part of the repetition of a micro-step, and return a phrase about what it has found.

    The phrase is empty if all values are finite. If the part raises an Exception, the phrase has
    the name of this error.

    Args:
        part: Method of `_Repetition`, with its arguments bound.
    """
    try:
        return part()
    except Exception as error:  # the non-finite step is reported, not an error of its repetition
        return f"{NOT_REPEATED}: {type(error).__name__}"


def _first_of_ranks(finding: str, global_rank: int) -> str:
    """Return the first finding of all ranks in the order of a step, or "" if there is none.

    A finding is a phrase about a value that is not finite. All ranks that take the step together
    must call this function, and get the same result. A finding in a layer comes before one in the
    loss and before the error of a rank, and then the lowest rank counts. The rank is named if there
    are several.

    Args:
        finding: Finding of this rank, or "".
        global_rank: Rank of this process.
    """
    ranks = gather((global_rank, finding))
    findings = [(rank, text) for rank, text in ranks if text]
    if not findings:
        return ""
    last = (LOSS, NOT_REPEATED)
    rank, text = min(findings, key=lambda item: (item[1].startswith(last), item[0]))
    return text if len(ranks) == 1 else f"{text} (rank {rank})"


class _Repetition:
    """Repetition of a micro-step in three parts, each of which checks values of this rank.

    All ranks that take the step together must call the methods in their order. The gradients of the
    parameters are replaced, and the caller restores them. Each method returns a phrase about the
    first value that is not finite, or an empty string.

    Args:
        module: LightningModule of the run.
        strategy: Strategy of the run.
    """

    def __init__(self, module: LightningModule, strategy: LightningStrategy):
        self.module = module
        self.strategy = strategy
        net = getattr(module, "net", None)
        self.watched: nn.Module = net if isinstance(net, nn.Module) else module
        self.forward_order: dict[nn.Module, int] = {}
        self.loss: Any = None

    def check_parameters(self) -> str:
        """Return a phrase about the first parameter that is not finite, before the step."""
        for name, parameter in self.watched.named_parameters():
            if not _is_finite([parameter]):
                return f"first not finite in the parameter {_without_wrappers(name)}"
        return ""

    def run_forward(self, args: Any, kwargs: Any) -> str:
        """Run training_step, and check the inputs and outputs of all modules, and the loss.

        Args:
            args: Arguments of training_step.
            kwargs: Keyword arguments of training_step.
        """
        findings: list[str] = []
        for optimizer in self.strategy.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled: no hooks
            stack.enter_context(without_logging(self.module))
            stack.enter_context(self.strategy.precision_plugin.train_step_context())
            for name, part in self.watched.named_modules():
                if part is self.watched and name == "":
                    continue
                for handle in _watch(part, _without_wrappers(name), findings, self.forward_order):
                    stack.callback(handle.remove)
            output: Any = self.module.training_step(*args, **kwargs)
        self.loss = output["loss"] if isinstance(output, dict) else output
        if findings:
            return f"first not finite in {findings[0]}"
        return "" if _is_finite([self.loss]) else f"{LOSS}; all layers are finite"

    def run_backward(self) -> str:
        """Run the backward pass, and check the gradients of the parameters.

        The phrase names the parameter whose module ran last in the forward pass, among those with a
        gradient that is not finite. Call this method after `run_forward`.
        """
        self.loss.backward()
        parameters = self.watched.named_parameters()
        nonfinite = [name for name, p in parameters if not _is_finite([p.grad])]
        if not nonfinite:
            return ""
        # The backward pass begins with the module that came last in the forward pass.
        name = max(nonfinite, key=self.forward_position)
        return f"the gradient is first not finite in {_without_wrappers(name)}"

    def forward_position(self, name: str) -> int:
        """Return when the module of a parameter ran in the forward pass, or -1 if it did not."""
        owner = self.watched.get_submodule(name.rpartition(".")[0])
        return self.forward_order.get(owner, -1)


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
