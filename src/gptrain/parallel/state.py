"""Checkpoints that any strategy writes and any other reads: names and shapes of the bare net.

Whole: every tensor gathered, one at a time, to rank 0's host memory. Sharded: every rank writes its
own slices by torch.distributed.checkpoint, which reads them back into any other slicing.
Optimizer states are kept by the parameter's name, since numbers of parameters depend on the stage:
`parameters` maps these names to parameters, the net's (`named_parameters`) and any beside it, which
every rank holds whole.
`Stages` is what a state must know of a pipeline, over whose ranks the net is partitioned.
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
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from gptrain.parallel.placement import copy_from_full, full_tensor, shard_like
from gptrain.parallel.positions import fill_positions, find_tables
from gptrain.parallel.requirements import tied_names
from gptrain.parallel.unmatched import Unmatched

State = dict[str, Any]
Parameters = Mapping[str, nn.Parameter]
Shapes = Mapping[str, tuple[int, ...]]
_PLAIN = (bool, int, float, str, type(None))
EXTRA_PREFIX = "module."  # in a file, in front of what a module holds beside its net


class Stages(NamedTuple):
    """The ranks over which the stages of a pipeline are spread.

    Attributes:
        group: None where every rank has the whole net, or slices of all its tensors.
        aliases: names that a stage holds for what one process has under another (a tied head).
    """

    group: dist.ProcessGroup | None = None
    aliases: Mapping[str, str] = {}


NO_STAGES = Stages()


def named_parameters(net: nn.Module, stages: Stages = NO_STAGES) -> dict[str, nn.Parameter]:
    """Name in a checkpoint -> parameter of the net; a tied one once, under its first name."""
    _reshard(net)
    return {stages.aliases.get(name, name): parameter for name, parameter in net.named_parameters()}


def named_extra_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a module that are not its net's, each once, under their own names."""
    net = getattr(module, "net", None)
    of_net = set(net.parameters()) if isinstance(net, nn.Module) else set()
    return {name: p for name, p in module.named_parameters() if p not in of_net}


def saved_parameters(module: nn.Module, stages: Stages = NO_STAGES) -> dict[str, nn.Parameter]:
    """Name in a checkpoint -> parameter of the module, each once."""
    net = getattr(module, "net", None)
    of_net = named_parameters(net, stages) if isinstance(net, nn.Module) else {}
    return of_net | {
        f"{EXTRA_PREFIX}{name}": p for name, p in named_extra_parameters(module).items()
    }


def full_net_state(net: nn.Module, stages: Stages = NO_STAGES) -> State:
    """The bare net's state dict, on the CPU of global rank 0; the others get {}. Collective."""
    state = _whole(_saved_tensors(net, stages), stages)
    second = {**tied_names(net), **stages.aliases}
    return state | {name: state[first] for name, first in second.items() if state}


def full_optimizer_state(
    parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> State:
    """Optimizer's state with names for numbers, on the CPU of global rank 0. Collective.

    Raises: ValueError as `named_groups`.
    """
    groups = named_groups(parameters, optimizer, stages)
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    return {"state": _whole({n: s for n, s in states.items() if s}, stages), "param_groups": groups}


def sharded_state(
    net: nn.Module, parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> State:
    """This rank's part for torch.distributed.checkpoint.save: values of "net" and "optimizer".

    A tied weight is there once, under its first name. Groups' options are in `named_groups`.
    """
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    for name, kind, value in ((n, k, v) for n, state in states.items() for k, v in state.items()):
        if not isinstance(value, (Tensor, *_PLAIN)):
            made = type(value).__name__
            raise ValueError(f"optimizer state {name}.{kind} is a {made}: shards hold tensors only")
    return {"net": _saved_tensors(net, stages), "optimizer": states}


def load_net_state(
    net: nn.Module,
    source: Mapping[str, Tensor] | dcp.StorageReader,
    *,
    strict: bool = True,
    resizes: bool = False,
    stages: Stages = NO_STAGES,
) -> Unmatched:
    """Copy this rank's part of a net's state into net. Of a pipeline all ranks must call it.

    Args:
        source: a bare net's state dict, or a sharded checkpoint of whatever slicing, for which all
            ranks must call it.
        strict: false loads what fits by name and shape.
        resizes: Load learned positions of another number too: all that are there into a longer
            table, and, if not strict, the first ones into a shorter table.

    Raises: ValueError that names all that does not fit, if strict.
    """
    if isinstance(source, dcp.StorageReader):
        entries = _entries(source, "net").items()
        shapes = {n: tuple(e.size) for n, e in entries if isinstance(e, TensorStorageMetadata)}
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
    fitting, tables, unmatched = _match(net, shapes, strict, resizes, stages)
    if isinstance(source, dcp.StorageReader):
        full: Mapping[str, Tensor] = {name: torch.empty(shapes[name]) for name in tables}
        _read({"net": {**fitting, **full}}, source)
    else:
        full = source
        for name, tensor in fitting.items():
            copy_from_full(tensor, source[name])
    for name, (tensor, dim) in tables.items():
        fill_positions(tensor, full[name], dim)
    return unmatched


def load_optimizer_state(
    parameters: Parameters,
    optimizer: Optimizer,
    source: Mapping[str, State] | dcp.StorageReader,
    groups: list[State],
) -> None:
    """Give optimizer this rank's part of a state by names.

    Args:
        source: the "state" of a whole one, or a sharded checkpoint, for which all ranks must call
            it.
        groups: the `named_groups` of the optimizer that was saved.

    Raises: ValueError if the state has no such groups.
    """
    if isinstance(source, dcp.StorageReader):
        values = _read_optimizer_state(parameters, source)
    else:
        values = {
            name: {kind: shard_like(v, parameter) for kind, v in source.get(name, {}).items()}
            for name, parameter in parameters.items()
        }
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
        for name in members:
            if name not in options_of or options_of[name] != options_of.get(members[0]):
                raise ValueError(f"{name}: not in a group with {members[0]} in the saved optimizer")
        options = options_of[members[0]] if members else {}
        restored.append({**group, **options, "params": [numbers[p] for p in group["params"]]})
    state = {numbers[p]: values[names[p]] for p in numbers if values[names[p]]}
    optimizer.load_state_dict({"state": state, "param_groups": restored})


def named_groups(
    parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> list[State]:
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


def _entries(reader: dcp.StorageReader, part: str) -> dict[str, Any]:
    """Name -> shape and type of what a sharded checkpoint holds of the net or the optimizer."""
    entries = reader.read_metadata().state_dict_metadata.items()
    return {k.removeprefix(f"{part}."): e for k, e in entries if k.startswith(f"{part}.")}


def _read_optimizer_state(parameters: Parameters, reader: dcp.StorageReader) -> dict[str, State]:
    """Name -> kind -> value of these parameters: local shards, numbers, and whole other tensors."""
    values: dict[str, State] = {name: {} for name in parameters}
    for key, entry in _entries(reader, "optimizer").items():
        name, _, kind = key.rpartition(".")
        if (parameter := parameters.get(name)) is None:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            values[name][kind] = None  # a number
        elif entry.size == parameter.shape:
            like = parameter.detach()
            values[name][kind] = torch.empty_like(like, dtype=entry.properties.dtype)
        else:
            values[name][kind] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read({"optimizer": values}, reader)
    return values


def _saved_tensors(net: nn.Module, stages: Stages) -> dict[str, Tensor]:
    """Name in a checkpoint -> tensor of the net's state, this rank's slice; a tied one once."""
    _reshard(net)
    second = tied_names(net)
    return {
        stages.aliases.get(name, name): tensor
        for name, tensor in net.state_dict().items()
        if name not in second
    }


def _reshard(net: nn.Module) -> None:
    """Free gathered weights, which an evaluation leaves in place of the shards."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _match(
    net: nn.Module, shapes: Shapes, strict: bool, resizes: bool, stages: Stages
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, int]], Unmatched]:
    """Match the tensors of a net with a checkpoint of these shapes.

    Returns:
        Name in a checkpoint -> the net's tensor that it fits; name -> table of positions that it
        fills in part, with their dimension; and the rest.

    Raises:
        ValueError: If anything is left and strict is true. It names all of it.
    """
    tensors = _saved_tensors(net, stages)
    mine = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tables = find_tables(net, mine, shapes) if resizes else {}
    everyones = _gather((mine, list(net.state_dict()), tables), stages)
    all_shapes = {name: shape for theirs, _, _ in everyones for name, shape in theirs.items()}
    all_tables = {name: dim for _, _, theirs in everyones for name, dim in theirs.items()}
    known = all_shapes.keys() | {name for _, theirs, _ in everyones for name in theirs}  # tied, too
    unmatched = Unmatched(
        [name for name in all_shapes if name not in shapes],
        [name for name in shapes if name not in known],
        {n: (shapes[n], s) for n, s in all_shapes.items() if shapes.get(n, s) != s},
        {},
    )
    cut = ""
    for name, dim in all_tables.items():
        there, here = (shape[dim or 0] for shape in unmatched.mismatched[name])
        if dim is not None and there > here and strict:
            cut = (
                f"; model.max_seq_len={there} keeps all learned positions, a shorter one cuts them"
            )
            continue
        del unmatched.mismatched[name]
        if dim is not None:
            unmatched.positions[name] = there, here
    if strict and (message := unmatched.describe()):
        raise ValueError(message + cut)
    filled = {
        name: (tensors[name], dim)
        for name, dim in tables.items()
        if dim is not None and name in unmatched.positions
    }
    return {n: t for n, t in tensors.items() if shapes.get(n) == mine[n]}, filled, unmatched


@torch.no_grad()
def _whole(state: State, stages: Stages) -> State:
    """All stages' values, gathered whole, on the CPU of global rank 0; {} on the others."""
    group = stages.group
    first = dist.get_rank() if dist.is_initialized() else 0
    if group is not None:  # other stages of the pipeline with rank 0 keep theirs, too
        first = dist.get_global_rank(group, 0)
    whole = {}
    for name, value in state.items():
        value = tree_map_only(Tensor, full_tensor, value)
        if first == 0:
            whole[name] = tree_map_only(Tensor, Tensor.cpu, value)
    if group is None:
        return whole
    mine, whole = list(whole.items()), {}
    for number in range(max(_gather(len(mine), stages))):  # not all at once: they pass the device
        received = [None] * group.size() if group.rank() == 0 else None
        one = mine[number] if number < len(mine) else None
        dist.gather_object(one, received, group=group, group_dst=0)
        whole |= dict(filter(None, received or ()))
    return whole


def _gather(value: Any, stages: Stages) -> list[Any]:
    """Every stage's value, on all of them."""
    if stages.group is None:
        return [value]
    values: list = [None] * stages.group.size()
    dist.all_gather_object(values, value, group=stages.group)
    return values


@torch.no_grad()
def _read(state: State, reader: dcp.StorageReader) -> None:
    with warnings.catch_warnings():  # loading in one process alone is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:  # the same on all ranks; the first failure says why
            raise next(failure for failure, _ in error.failures.values()) from error
