"""Checkpoints that any strategy writes and any other reads: names and shapes of the bare net.

Whole: every tensor gathered, one at a time, to rank 0's host memory. Sharded: every rank writes its
own slices by torch.distributed.checkpoint, which reads them back into any other slicing.
Optimizer states are kept by the parameter's name, since numbers of parameters depend on the stage:
`parameters` maps these names to parameters, the net's (`named_parameters`) and any beside it, which
every rank holds whole.
`aliases` are names that a stage holds for what one process has under another (a tied head), and
`stages` is the group of a pipeline's ranks, over which the net is partitioned.
"""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gptrain.parallel.fit import tied_names
from gptrain.parallel.fsdp import reshard
from gptrain.parallel.slices import copy_slice, like_parameter, whole_of

State = dict[str, Any]
Group = dist.ProcessGroup | None
Aliases = Mapping[str, str]
Parameters = Mapping[str, nn.Parameter]
Shapes = Mapping[str, tuple[int, ...]]
NO_ALIASES: Aliases = {}
_PLAIN = (bool, int, float, str, type(None))
_SHOWN = 4  # names told in a message; a net of another width has one for each tensor


class Unmatched(NamedTuple):
    """What does not fit between a net and a state: names, over all stages of a pipeline.

    Attributes:
        missing: in the net only.   unexpected: in the state only.
        mismatched: in both, with the shapes (in the state, in the net).
    """

    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def describe(self) -> str:
        """One line that names both sides."""
        wrong = [f"{n} {there} there, {here} here" for n, (there, here) in self.mismatched.items()]
        wrong += [f"{name} here only" for name in self.missing]
        wrong += [f"{name} there only" for name in self.unexpected]
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        return "; ".join(wrong[:_SHOWN]) + more


def named_parameters(net: nn.Module, aliases: Aliases = NO_ALIASES) -> dict[str, nn.Parameter]:
    """Name in a checkpoint -> parameter of the net; a tied one once, under its first name."""
    reshard(net)
    return {aliases.get(name, name): parameter for name, parameter in net.named_parameters()}


def whole_net_state(
    net: nn.Module, *, aliases: Aliases = NO_ALIASES, stages: Group = None
) -> State:
    """The bare net's state dict, on the CPU of global rank 0; the others get {}. Collective."""
    reshard(net)
    second = tied_names(net) | aliases  # such a weight is gathered and sent once
    state = {}
    for name, tensor in net.state_dict().items():
        if name not in second:
            whole = whole_of(tensor)
            if _keeps(stages):
                state[name] = whole.cpu()
    state = _merge_stages(state, stages)
    return state | {name: state[first] for name, first in second.items() if state}


def load_whole_net_state(
    net: nn.Module,
    state: State,
    *,
    strict: bool = True,
    aliases: Aliases = NO_ALIASES,
    stages: Group = None,
) -> Unmatched:
    """Copy each rank's slices of a bare net's state dict into net. Of a pipeline all must call it.

    Args:
        strict: false loads what fits by name and shape.

    Raises: ValueError that names all that does not fit, if strict.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    fitting, unmatched = _match(net, shapes, strict, aliases, stages)
    for name, tensor in fitting.items():
        copy_slice(tensor, state[name])
    return unmatched


def whole_optimizer_state(
    parameters: Parameters, optimizer: Optimizer, *, stages: Group = None
) -> State:
    """Optimizer's state with names for numbers, on the CPU of global rank 0. Collective.

    Raises: ValueError if the optimizer has a parameter that is not among `parameters`, or options
        that are no plain values.
    """
    flat = {}
    for key, value in _flat_optimizer_state(parameters, optimizer).items():
        value = tree_map_only(Tensor, whole_of, value)
        if _keeps(stages):
            flat[key] = tree_map_only(Tensor, Tensor.cpu, value)
    state: State = {"state": {}, "param_groups": named_groups(parameters, optimizer, stages)}
    for key, value in _merge_stages(flat, stages).items():
        name, _, kind = key.rpartition(".")
        state["state"].setdefault(name, {})[kind] = value
    return state


def load_whole_optimizer_state(parameters: Parameters, optimizer: Optimizer, state: State) -> None:
    """Give optimizer each rank's slices of a named state. No communication.

    Raises: ValueError if the state has no such groups.
    """
    values = {
        name: {
            kind: like_parameter(value, parameter)
            for kind, value in state["state"].get(name, {}).items()
        }
        for name, parameter in parameters.items()
    }
    _load_named(parameters, optimizer, values, state["param_groups"])


def sharded_state(
    net: nn.Module,
    parameters: Parameters = NO_ALIASES,
    optimizer: Optimizer | None = None,
    *,
    aliases: Aliases = NO_ALIASES,
) -> State:
    """This rank's part for torch.distributed.checkpoint.save: "net.*" and "optimizer.*" values.

    A tied weight is there once, under its first name. Groups' options are in `named_groups`.
    """
    reshard(net)
    second = tied_names(net)
    state: State = {
        f"net.{aliases.get(name, name)}": tensor
        for name, tensor in net.state_dict().items()
        if name not in second
    }
    if optimizer is not None:
        for key, value in _flat_optimizer_state(parameters, optimizer).items():
            if not isinstance(value, (Tensor, *_PLAIN)):
                kind = type(value).__name__
                raise ValueError(f"optimizer state {key} is a {kind}: shards hold tensors only")
            state[f"optimizer.{key}"] = value
    return state


def load_sharded_net(
    net: nn.Module,
    reader: dcp.StorageReader,
    *,
    strict: bool = True,
    aliases: Aliases = NO_ALIASES,
    stages: Group = None,
) -> Unmatched:
    """As load_whole_net_state, from a sharded checkpoint of whatever slicing. Collective."""
    stored = reader.read_metadata().state_dict_metadata
    shapes = {
        key.removeprefix("net."): tuple(entry.size)
        for key, entry in stored.items()
        if key.startswith("net.") and isinstance(entry, TensorStorageMetadata)
    }
    fitting, unmatched = _match(net, shapes, strict, aliases, stages)
    _read({f"net.{name}": tensor.detach() for name, tensor in fitting.items()}, reader)
    return unmatched


def load_sharded_optimizer(
    parameters: Parameters, optimizer: Optimizer, groups: list[State], reader: dcp.StorageReader
) -> None:
    """As load_whole_optimizer_state, from a sharded checkpoint. Collective.

    Args:
        groups: the `named_groups` that were saved beside it.
    """
    state: State = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters.get(key.removeprefix("optimizer.").rpartition(".")[0])
        if parameter is None or not key.startswith("optimizer."):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = None  # a number
        elif entry.size == parameter.shape:
            state[key] = torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
        else:
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read(state, reader)
    values: dict[str, State] = {name: {} for name in parameters}
    for key, value in state.items():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        values[name][kind] = value
    _load_named(parameters, optimizer, values, groups)


def named_groups(parameters: Parameters, optimizer: Optimizer, stages: Group = None) -> list[State]:
    """The optimizer's groups, plain options and names of parameters; those of all stages."""
    names = _names(parameters, optimizer)
    groups = [
        {
            key: [names[p] for p in value] if key == "params" else _plain(key, value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    return [group for theirs in _gather(groups, stages) for group in theirs]


def _load_named(
    parameters: Parameters, optimizer: Optimizer, values: Mapping[str, State], groups: list[State]
) -> None:
    """Hand optimizer the local values of each parameter, and the options of its group."""
    names = _names(parameters, optimizer)
    options_of = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in groups
        for name in group["params"]
    }
    numbers = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    restored = []
    for group in optimizer.param_groups:
        members = [names[p] for p in group["params"]]
        options = options_of.get(members[0]) if members else {}
        other = next((n for n in members if options_of.get(n) != options or not options), None)
        if other is not None:
            raise ValueError(f"{other}: not in a group with {members[0]} in the saved optimizer")
        restored.append({**group, **options, "params": [numbers[p] for p in group["params"]]})
    state = {numbers[p]: values[names[p]] for p in numbers if values[names[p]]}
    optimizer.load_state_dict({"state": state, "param_groups": restored})


def _names(parameters: Parameters, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    names = {parameter: name for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"group {number} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not one of the module's, so that it has no "
                    f"name in a checkpoint; register it with the module or its net"
                )
    return names


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()  # a learning rate on the device
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(key, item) for item in value)
    if not isinstance(value, _PLAIN):
        kind = type(value).__name__
        raise ValueError(f"option {key} of the optimizer is a {kind}: only plain values are saved")
    return value


def _flat_optimizer_state(parameters: Parameters, optimizer: Optimizer) -> dict[str, Any]:
    _names(parameters, optimizer)
    return {
        f"{name}.{kind}": value
        for name, parameter in parameters.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def _match(
    net: nn.Module, shapes: Shapes, strict: bool, aliases: Aliases, stages: Group
) -> tuple[dict[str, Tensor], Unmatched]:
    """Name in a checkpoint of these shapes -> the net's tensor that it fits; and what fits not."""
    reshard(net)
    held, first = net.state_dict(keep_vars=True), tied_names(net) | aliases
    wanted = {  # a tied weight may stand there under its first name only
        name if name in shapes and name not in aliases else first.get(name, name): tensor
        for name, tensor in held.items()
    }
    mine = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    fitting = {name: wanted[name] for name, shape in mine.items() if shapes.get(name) == shape}
    everyones = _gather((mine, list(held)), stages)
    all_shapes = {name: shape for theirs, _ in everyones for name, shape in theirs.items()}
    known = {name for _, theirs in everyones for name in theirs} | all_shapes.keys()
    unmatched = Unmatched(
        [name for name in all_shapes if name not in shapes],
        [name for name in shapes if name not in known],
        {n: (shapes[n], s) for n, s in all_shapes.items() if shapes.get(n, s) != s},
    )
    if strict and any(unmatched):
        raise ValueError(unmatched.describe())
    return fitting, unmatched


def _merge_stages(state: State, stages: Group) -> State:
    """All stages' values on the first of them, sent one at a time; {} on the others."""
    if stages is None or stages.size() == 1:
        return state
    counts, first = _gather(len(state), stages), dist.get_global_rank(stages, 0)
    if stages.rank() != 0:
        for item in state.items():
            dist.send_object_list([item], first, group=stages)
        return {}
    for sender in range(1, stages.size()):
        for _ in range(counts[sender]):
            received: list = [None]
            dist.recv_object_list(received, dist.get_global_rank(stages, sender), group=stages)
            state.setdefault(*received[0])
    return state


def _gather(value: Any, stages: Group) -> list[Any]:
    """Every stage's value, on all of them."""
    if stages is None or stages.size() == 1:
        return [value]
    values: list = [None] * stages.size()
    dist.all_gather_object(values, value, group=stages)
    return values


def _keeps(stages: Group) -> bool:
    # Stages keep what they hold until it is merged; elsewhere only rank 0's is used.
    return stages is not None or not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def _read(state: State, reader: dcp.StorageReader) -> None:
    with warnings.catch_warnings():  # loading in one process alone is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # the same on all ranks; the first failure says why
            raise next(failure for failure, _ in error.failures.values()) from error
