"""Checkpoints that any strategy writes and any other reads: names and shapes of the bare net.

Whole: every tensor gathered, one at a time, to rank 0's host memory. Sharded: every rank writes its
own slices by torch.distributed.checkpoint, which reads them back into any other slicing.
Optimizer states are kept by the parameter's name, since numbers of parameters depend on the stage.
`aliases` are names that a stage holds for what one process has under another (a tied head).
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from gptrain.parallel.fsdp import reshard
from gptrain.parallel.slices import copy_slice, like_parameter, whole_of
from gptrain.parallel.stages import merge_stages

State = dict[str, Any]
NO_ALIASES: Mapping[str, str] = {}


def whole_net_state(
    net: nn.Module,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
    stages: dist.ProcessGroup | None = None,
) -> State:
    """The bare net's state dict, on the CPU of global rank 0; the others get {}. Collective.

    Args:
        stages: the group of a pipeline's ranks, over which the net is cut.
    """
    reshard(net)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    wholes: dict[Tensor, Tensor] = {}  # a tied weight is gathered once
    state = {}
    for name, tensor in net.state_dict().items():
        parameter = parameters.get(name, tensor)
        if parameter not in wholes:
            wholes[parameter] = whole_of(tensor)
            if _keeps(stages):
                wholes[parameter] = wholes[parameter].cpu()
        if _keeps(stages) and name not in aliases:
            state[name] = wholes[parameter]
    state = merge_stages(state, stages)
    return state | {name: state[first] for name, first in aliases.items() if state}


def load_whole_net_state(
    net: nn.Module, state: Mapping[str, Tensor], *, aliases: Mapping[str, str] = NO_ALIASES
) -> None:
    """Copy each rank's slices of a bare net's state dict into net. No communication.

    Raises: KeyError if a name is missing; ValueError if a shape differs.
    """
    for name, tensor in net.state_dict(keep_vars=True).items():
        copy_slice(tensor, state[aliases.get(name, name)])


def whole_optimizer_state(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
    stages: dist.ProcessGroup | None = None,
) -> State:
    """Optimizer's state with names for numbers, on the CPU of global rank 0. Collective."""
    tensors = {}
    for key, value in _flat_optimizer_state(net, optimizer, aliases):
        whole = whole_of(value)
        if _keeps(stages):
            tensors[key] = whole.cpu()
    state: State = {"state": {}, "param_groups": named_groups(net, optimizer, aliases, stages)}
    for key, value in merge_stages(tensors, stages).items():
        name, _, kind = key.rpartition(".")
        state["state"].setdefault(name, {})[kind] = value
    return state


def load_whole_optimizer_state(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: State,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
) -> None:
    """Give optimizer each rank's slices of a named state. No communication."""
    values = {
        name: {
            kind: like_parameter(value, parameter)
            for kind, value in state["state"].get(aliases.get(name, name), {}).items()
        }
        for name, parameter in _named_parameters(net)
    }
    load_named(net, optimizer, values, state["param_groups"], aliases)


def sharded_state(
    net: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
) -> dict[str, Tensor]:
    """This rank's part for torch.distributed.checkpoint.save: "net.*" and "optimizer.*" tensors.

    A tied weight is there once, under its first name. Groups' options are in `named_groups`.
    """
    reshard(net)
    parameters = dict(net.named_parameters(remove_duplicate=False))
    first = {name for name, _ in _named_parameters(net)}
    state = {
        f"net.{aliases.get(name, name)}": tensor
        for name, tensor in net.state_dict().items()
        if name in first or name not in parameters
    }
    if optimizer is not None:
        for key, value in _flat_optimizer_state(net, optimizer, aliases):
            state[f"optimizer.{key}"] = value
    return state


def load_sharded_net(
    net: nn.Module, reader: dcp.StorageReader, *, aliases: Mapping[str, str] = NO_ALIASES
) -> None:
    """Read a sharded checkpoint, of whatever slicing, into net. Collective."""
    _read(sharded_state(net, None, aliases=aliases), reader)


def load_sharded_optimizer(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: list[State],
    reader: dcp.StorageReader,
    *,
    aliases: Mapping[str, str] = NO_ALIASES,
) -> None:
    """As load_sharded_net, into optimizer. Collective.

    Args:
        groups: the `named_groups` that were saved beside it.
    """
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {}
    values: dict[str, State] = {name: {} for name, _ in _named_parameters(net)}
    for name, parameter in _named_parameters(net):
        prefix = f"optimizer.{aliases.get(name, name)}."
        for key in stored:
            kind = key.removeprefix(prefix)
            if kind != key and "." not in kind:
                entry = stored[key]
                alike = entry.size == parameter.shape
                state[key] = torch.empty_like(parameter) if alike else _empty(entry)
                values[name][kind] = state[key]
    _read(state, reader)
    load_named(net, optimizer, values, groups, aliases)


def named_groups(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    aliases: Mapping[str, str] = NO_ALIASES,
    stages: dist.ProcessGroup | None = None,
) -> list[State]:
    """Options of the optimizer's groups with their parameters' names, over all stages."""
    names = {parameter: name for name, parameter in _named_parameters(net)}
    groups = []
    for group in optimizer.param_groups:
        mine = [aliases.get(names[p], names[p]) for p in group["params"]]
        groups.append({**group, "params": mine})
    if stages is None or stages.size() == 1:
        return groups
    everyones: list = [None] * stages.size()
    dist.all_gather_object(everyones, groups, group=stages)
    merged: list[State] = []
    for group in (group for theirs in everyones for group in theirs):
        options = {key: value for key, value in group.items() if key != "params"}
        for known in merged:
            if {key: value for key, value in known.items() if key != "params"} == options:
                known["params"] += [n for n in group["params"] if n not in known["params"]]
                break
        else:
            merged.append(group)
    return merged


def load_named(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    values: Mapping[str, State],
    groups: list[State],
    aliases: Mapping[str, str] = NO_ALIASES,
) -> None:
    """Hand optimizer the local values of each parameter, and the options of its group."""
    names = {parameter: name for name, parameter in _named_parameters(net)}
    group_of = {name: group for group in groups for name in group["params"]}
    numbers = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    restored = []
    for group in optimizer.param_groups:
        members = [aliases.get(names[p], names[p]) for p in group["params"]]
        options = group_of[members[0]] if members else group
        restored.append({**options, "params": [numbers[p] for p in group["params"]]})
    state = {numbers[p]: values[names[p]] for p in numbers if values[names[p]]}
    optimizer.load_state_dict({"state": state, "param_groups": restored})


def _flat_optimizer_state(
    net: nn.Module, optimizer: torch.optim.Optimizer, aliases: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _named_parameters(net):
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"{aliases.get(name, name)}.{kind}", value


def _named_parameters(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    reshard(net)
    return list(net.named_parameters())


def _keeps(stages: dist.ProcessGroup | None) -> bool:
    # Stages keep what they hold until it is merged; elsewhere only rank 0's is used.
    return stages is not None or not dist.is_initialized() or dist.get_rank() == 0


@torch.no_grad()
def _read(state: dict[str, Tensor], reader: dcp.StorageReader) -> None:
    with warnings.catch_warnings():  # that one process loads alone is meant
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())


def _empty(stored: Any) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype)
