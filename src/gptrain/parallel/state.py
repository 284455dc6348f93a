"""State dicts of net and optimizer that every strategy can write and every other strategy can read.

Names and shapes in a state are those of the unpartitioned net.

- A full state has full tensors, which are gathered one after another in the host memory of rank 0.
- A sharded state has the shards of this rank. torch.distributed.checkpoint writes them, and reads
  them back into any other sharding.

Optimizer states are stored by parameter name, because the indices of torch's state dict depend on
the pipeline stage. The argument `parameters` of these functions maps the names to parameters: those
of the net (`named_parameters`), and those of the module outside `net`, which every rank holds in
full. The argument `stages` describes the pipeline over which the net is partitioned.
"""

import warnings
from collections.abc import Mapping, Set
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

from gptrain.parallel.mesh import gather
from gptrain.parallel.placement import copy_from_full, full_tensor, shard_like
from gptrain.parallel.positions import fill_positions, find_tables
from gptrain.parallel.requirements import tied_names
from gptrain.parallel.unmatched import Unmatched

State = dict[str, Any]
Parameters = Mapping[str, nn.Parameter]
Shapes = Mapping[str, tuple[int, ...]]
_PLAIN = (bool, int, float, str, type(None))
# Prefix, in a checkpoint, of the names of a LightningModule's tensors outside `net`.
EXTRA_PREFIX = "module."


class Stages(NamedTuple):
    """Ranks that hold the stages of a pipeline, and the names of tied parameters.

    Attributes:
        group: Ranks of the pipeline. None without a pipeline: every rank then has the full net, or
            a shard of every tensor.
        aliases: Further name of a tied parameter -> its first name in the full net. The stage of
            the head holds the parameter only under the further name.
    """

    group: dist.ProcessGroup | None = None
    aliases: Mapping[str, str] = {}


NO_STAGES = Stages()


def named_parameters(net: nn.Module, stages: Stages = NO_STAGES) -> dict[str, nn.Parameter]:
    """Return name in a checkpoint -> parameter of the net, on this rank without communication.

    A tied parameter appears once, under its first name. Also frees weights that FSDP has gathered.

    Args:
        net: Net as the strategy has partitioned it.
        stages: Stages of the pipeline, which know the first names of tied parameters.
    """
    _reshard(net)
    return {stages.aliases.get(name, name): parameter for name, parameter in net.named_parameters()}


def named_extra_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter for the parameters of a module outside its `net`.

    The names are those in the module. All parameters are returned if the module has no `net`.

    Args:
        module: LightningModule, or any module.
    """
    net = getattr(module, "net", None)
    net_parameters = set(net.parameters()) if isinstance(net, nn.Module) else set()
    return {name: p for name, p in module.named_parameters() if p not in net_parameters}


def saved_parameters(module: nn.Module, stages: Stages = NO_STAGES) -> dict[str, nn.Parameter]:
    """Return name in a checkpoint -> parameter of this rank, for all parameters of a module.

    A parameter of `module.net` has its name in the net, and a tied parameter of the net appears
    once, under its first name. The name of any other parameter begins with EXTRA_PREFIX.

    Args:
        module: Module, usually with an attribute `net`.
        stages: Stages of the pipeline, which know the first names of tied parameters.
    """
    net = getattr(module, "net", None)
    named = named_parameters(net, stages) if isinstance(net, nn.Module) else {}
    for name, parameter in named_extra_parameters(module).items():
        named[f"{EXTRA_PREFIX}{name}"] = parameter
    return named


def full_net_state(net: nn.Module, stages: Stages = NO_STAGES) -> State:
    """Return the state dict of the unpartitioned net.

    All ranks must call this function.

    Args:
        net: Net as the strategy has partitioned it.
        stages: Stages of the pipeline.

    Returns:
        Name -> tensor on the CPU, with all names of tied parameters, on global rank 0; {} on all
        other ranks.
    """
    state = _gather_full(_saved_tensors(net, stages), stages)
    first_names = {**tied_names(net), **stages.aliases}
    return state | {name: state[first] for name, first in first_names.items() if state}


def full_optimizer_state(
    parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> State:
    """Return the optimizer's state dict with full tensors and names in place of indices.

    All ranks must call this function.

    Args:
        parameters: Name in a checkpoint -> parameter of this rank. Parameters outside of the net
            are included.
        optimizer: Optimizer of these parameters.
        stages: Stages of the pipeline.

    Returns:
        `state` (name -> kind -> value, for example `exp_avg`) and `param_groups` (a list of dicts
        in which `params` is a list of names). `state` is on the CPU of global rank 0, and {} on all
        other ranks. It lacks the parameters for which the optimizer has no state yet.

    Raises:
        ValueError: If a parameter of the optimizer has no name in `parameters`, or if an option of
            a parameter group is not a plain value.
    """
    groups = named_groups(parameters, optimizer, stages)
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    non_empty = {name: state for name, state in states.items() if state}
    return {"state": _gather_full(non_empty, stages), "param_groups": groups}


def sharded_state(
    net: nn.Module, parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> State:
    """Return this rank's part of a state for torch.distributed.checkpoint.save.

    There is no communication. The tensors are those of net and optimizer, not copies.

    Args:
        net: Net as the strategy has partitioned it.
        parameters: Name in a checkpoint -> parameter of this rank. Parameters outside of the net
            are included.
        optimizer: Optimizer of these parameters.
        stages: Stages of the pipeline.

    Returns:
        `net` (name -> tensor) and `optimizer` (name -> kind -> value, for example `exp_avg`). A
        tied parameter appears once, under its first name. Options of the parameter groups, such as
        `lr`, are not included; `named_groups` returns them.

    Raises:
        ValueError: If the optimizer's state has a value that is neither a tensor nor plain.
    """
    states = {name: optimizer.state.get(p, {}) for name, p in parameters.items()}
    for name, state in states.items():
        for kind, value in state.items():
            if not isinstance(value, (Tensor, *_PLAIN)):
                raise ValueError(
                    f"optimizer state {name}.{kind} is a {type(value).__name__}; "
                    f"allowed in a sharded checkpoint: tensors, numbers, strings"
                )
    return {"net": _saved_tensors(net, stages), "optimizer": states}


def load_net_state(
    net: nn.Module,
    source: Mapping[str, Tensor] | dcp.StorageReader,
    *,
    strict: bool = True,
    resizes: bool = False,
    stages: Stages = NO_STAGES,
    optional: Set[str] = frozenset(),
) -> Unmatched:
    """Copy this rank's part of a state into the net.

    All ranks must call this function if `source` is a sharded checkpoint, if the net is partitioned
    over a pipeline, or if `resizes` is true and the net is sharded.

    Args:
        net: Net as the strategy has partitioned it.
        source: State dict of the unpartitioned net, or a sharded checkpoint with any sharding.
        strict: Raise an error if names or shapes differ. False loads the tensors whose name and
            shape match.
        resizes: Also load tables of learned positions with another number of positions: all saved
            positions into a longer table, and, if not strict, the first ones into a shorter table.
        stages: Stages of the pipeline.
        optional: Names of this rank's tensors that the state need not have.

    Returns:
        Names and shapes that do not match, and tables of positions that were loaded in part.

    Raises:
        ValueError: If `strict` is true and names or shapes differ. The message names the first of
            them. An error of reading a sharded checkpoint on any rank is raised on all ranks.
    """
    if isinstance(source, dcp.StorageReader):
        shapes = {
            name: tuple(entry.size)
            for name, entry in _entries(source, "net").items()
            if isinstance(entry, TensorStorageMetadata)
        }
    else:
        shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
    fitting, tables, unmatched = _match(net, shapes, strict, resizes, stages, optional)
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
    """Load this rank's part of an optimizer state.

    All ranks must call this function if `source` is a sharded checkpoint. A parameter for which
    `source` has no values has no state afterwards, as before the first step.

    Args:
        parameters: Name in a checkpoint -> parameter of this rank.
        optimizer: Optimizer over these parameters. Its state and the options of its parameter
            groups are replaced.
        source: Entry `state` of `full_optimizer_state`, or a sharded checkpoint.
        groups: `named_groups` of the saved optimizer.

    Raises:
        ValueError: If a parameter of the optimizer has no name in `parameters`, or if parameters
            that are in one group now were not in groups with the same options in the saved
            optimizer. An error of reading a sharded checkpoint on any rank is raised on all ranks.
    """
    if isinstance(source, dcp.StorageReader):
        values = _read_optimizer_state(parameters, source)
    else:
        values = {
            name: {
                kind: shard_like(value, parameter) for kind, value in source.get(name, {}).items()
            }
            for name, parameter in parameters.items()
        }
    names = _names(parameters, optimizer)
    saved_options = {name: options_of(group) for group in groups for name in group["params"]}
    # Indices of parameters in torch's state dict: counted over all groups.
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    indices = {parameter: index for index, parameter in enumerate(ordered)}
    restored_groups = []
    for group in optimizer.param_groups:
        members = [names[p] for p in group["params"]]
        for name in members:
            if name not in saved_options or saved_options[name] != saved_options.get(members[0]):
                raise ValueError(f"{name}: not in a group with {members[0]} in the saved optimizer")
        options = saved_options[members[0]] if members else {}
        members_of_group = [indices[p] for p in group["params"]]
        restored_groups.append({**group, **options, "params": members_of_group})
    state = {indices[p]: values[names[p]] for p in indices if values[names[p]]}
    optimizer.load_state_dict({"state": state, "param_groups": restored_groups})


def named_groups(
    parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> list[State]:
    """Return the optimizer's parameter groups of all pipeline stages, with parameter names.

    All ranks of a pipeline must call this function.

    Args:
        parameters: Name in a checkpoint -> parameter of this rank.
        optimizer: Optimizer of these parameters.
        stages: Stages of the pipeline.

    Returns:
        One dict for each group: `params` is a list of names, all other options are plain values.

    Raises:
        ValueError: If a parameter has no name in `parameters`, or if an option is not a plain
            value.
    """
    names = _names(parameters, optimizer)
    groups = [
        {
            key: [names[p] for p in value] if key == "params" else _plain(key, value)
            for key, value in group.items()
        }
        for group in optimizer.param_groups
    ]
    return [group for stage_groups in _gather_objects(groups, stages) for group in stage_groups]


def _names(parameters: Parameters, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Return parameter -> name, for all parameters of `parameters`.

    Args:
        parameters: Name in a checkpoint -> parameter.
        optimizer: Optimizer whose parameters must all have a name.

    Raises:
        ValueError: If a parameter of the optimizer has no name in `parameters`.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(
                    f"group {number} of {type(optimizer).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not a parameter of the module, so it has no "
                    f"name in a checkpoint; try: register it with the module or its net"
                )
    return names


def _plain(key: str, value: Any) -> Any:
    """Return an option of a parameter group as a plain value for a checkpoint.

    A tensor with one element becomes a number. Lists and tuples are converted item by item.

    Args:
        key: Name of the option, such as `lr`, for the error message.
        value: Value of the option.

    Raises:
        ValueError: If the value is no tensor with one element, number, string or None.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()  # for example a learning rate on the device
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(key, item) for item in value)
    if not isinstance(value, _PLAIN):
        raise ValueError(
            f"option {key} of the optimizer is a {type(value).__name__}; "
            f"allowed in a checkpoint: numbers, strings, None"
        )
    return value


def _entries(reader: dcp.StorageReader, part: str) -> dict[str, Any]:
    """Return the metadata of one part of a sharded checkpoint, by name.

    Args:
        reader: Reader of the checkpoint.
        part: "net" or "optimizer".

    Returns:
        Name without the prefix of the part -> TensorStorageMetadata, or BytesStorageMetadata for a
        plain value. Names of "optimizer" end in the kind of state, for example `w.exp_avg`.
    """
    prefix = f"{part}."
    return {
        key.removeprefix(prefix): entry
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(prefix)
    }


def _read_optimizer_state(parameters: Parameters, reader: dcp.StorageReader) -> dict[str, State]:
    """Read the optimizer state of this rank's parameters from a sharded checkpoint.

    All ranks must call this function.

    Args:
        parameters: Name in a checkpoint -> parameter of this rank.
        reader: Reader of the checkpoint.

    Returns:
        Name -> kind, for example `exp_avg` -> value. A tensor of the parameter's shape is sharded
        like the parameter. A tensor of another shape is read in full. All other values are plain.
        A parameter without state in the checkpoint has an empty dict.
    """
    values: dict[str, State] = {name: {} for name in parameters}
    for key, entry in _entries(reader, "optimizer").items():
        name, _, kind = key.rpartition(".")
        parameter = parameters.get(name)
        if parameter is None:
            continue
        if not isinstance(entry, TensorStorageMetadata):
            values[name][kind] = None  # dcp.load replaces plain values
        elif entry.size == parameter.shape:
            like = parameter.detach()
            values[name][kind] = torch.empty_like(like, dtype=entry.properties.dtype)
        else:
            values[name][kind] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read({"optimizer": values}, reader)
    return values


def _saved_tensors(net: nn.Module, stages: Stages) -> dict[str, Tensor]:
    """Return name in a checkpoint -> tensor of the net, or this rank's shard of the tensor.

    Parameters and persistent buffers are included. A tied parameter appears once, under its first
    name. Also frees weights that FSDP has gathered.

    Args:
        net: Net as the strategy has partitioned it.
        stages: Stages of the pipeline, which know the first names of tied parameters.
    """
    _reshard(net)
    first_names = tied_names(net)
    return {
        stages.aliases.get(name, name): tensor
        for name, tensor in net.state_dict().items()
        if name not in first_names
    }


def _reshard(net: nn.Module) -> None:
    """Free the full weights that FSDP still holds after an evaluation, and keep only the shards."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _match(
    net: nn.Module,
    shapes: Shapes,
    strict: bool,
    resizes: bool,
    stages: Stages,
    optional: Set[str],
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, int]], Unmatched]:
    """Match the tensors of a net with the tensors of a checkpoint.

    All ranks of a pipeline must call this function.

    Args:
        net: Net as the strategy has partitioned it.
        shapes: Name -> shape of the tensors in the checkpoint.
        strict: Raise an error if names or shapes differ.
        resizes: Accept tables of learned positions with another number of positions.
        stages: Stages of the pipeline.
        optional: Names of this rank's tensors that the checkpoint need not have.

    Returns:
        Name -> tensor of this rank with the same shape; name -> (table of positions of this rank
        that the checkpoint fills in part, dimension of the positions); and the differences over all
        stages.

    Raises:
        ValueError: If `strict` is true and names or shapes differ.
    """
    tensors = _saved_tensors(net, stages)
    local_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    local_tables = find_tables(net, local_shapes, shapes) if resizes else {}
    net_shapes: dict[str, tuple[int, ...]] = {}
    net_tables: dict[str, int | None] = {}
    net_names: set[str] = set()  # includes all names of tied parameters
    optional_names: set[str] = set()
    local = (local_shapes, local_tables, list(net.state_dict()), optional)
    for stage_shapes, stage_tables, stage_names, names in _gather_objects(local, stages):
        optional_names |= names
        net_shapes |= stage_shapes
        net_tables |= stage_tables
        net_names |= {*stage_shapes, *stage_names}
    unmatched = Unmatched(
        missing=[name for name in net_shapes if name not in {*shapes, *optional_names}],
        unexpected=[name for name in shapes if name not in net_names],
        mismatched={
            name: (shapes[name], shape)
            for name, shape in net_shapes.items()
            if shapes.get(name, shape) != shape
        },
        positions={},
    )
    hint = ""
    for name, dim in net_tables.items():
        n_saved, n_net = (shape[dim or 0] for shape in unmatched.mismatched[name])
        if dim is not None and n_saved > n_net and strict:
            hint = f"; model.max_seq_len={n_saved} keeps all learned positions"
            continue
        del unmatched.mismatched[name]
        if dim is not None:
            unmatched.positions[name] = n_saved, n_net
    if strict and (message := unmatched.describe()):
        raise ValueError(message + hint)
    tables = {
        name: (tensors[name], dim)
        for name, dim in local_tables.items()
        if dim is not None and name in unmatched.positions
    }
    matching = {
        name: tensor for name, tensor in tensors.items() if shapes.get(name) == local_shapes[name]
    }
    return matching, tables, unmatched


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group of an optimizer: all entries but its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


@torch.no_grad()
def _gather_full(state: State, stages: Stages) -> State:
    """Gather the full tensors of all stages on the CPU of global rank 0.

    All ranks must call this function.

    Args:
        state: Name -> tensor or nested values of this rank.
        stages: Stages of the pipeline.

    Returns:
        Name -> full value on global rank 0; {} on all other ranks.
    """
    group = stages.group
    destination = dist.get_rank() if dist.is_initialized() else 0
    if group is not None:
        # Every stage of the pipeline that contains global rank 0 keeps its values to send them.
        destination = dist.get_global_rank(group, 0)
    full = {}
    for name, value in state.items():
        value = tree_map_only(Tensor, full_tensor, value)
        if destination == 0:
            full[name] = tree_map_only(Tensor, Tensor.cpu, value)
    if group is None:
        return full
    # One value at a time: gather_object sends it through device memory.
    items = list(full.items())
    gathered: State = {}
    for index in range(max(_gather_objects(len(items), stages))):
        received = [None] * group.size() if group.rank() == 0 else None
        item = items[index] if index < len(items) else None
        dist.gather_object(item, received, group=group, group_dst=0)
        gathered |= dict(filter(None, received or ()))
    return gathered


def _gather_objects(value: Any, stages: Stages) -> list[Any]:
    """Gather a picklable value of each rank of the pipeline, on all of its ranks.

    All ranks of the pipeline must call this function. Without a pipeline the list holds `value`
    only.
    """
    return [value] if stages.group is None else gather(value, stages.group)


@torch.no_grad()
def _read(state: State, reader: dcp.StorageReader) -> None:
    """Read a sharded checkpoint into the tensors of a state, in place.

    All ranks must call this function, if there is a process group.

    Args:
        state: Nested dict of tensors and plain values under the names of the checkpoint. Names that
            it lacks are not read.
        reader: Reader of the checkpoint.

    Raises:
        Exception: If reading fails on any rank: the first failure, on all ranks.
    """
    with warnings.catch_warnings():
        # A single process may read a sharded checkpoint without a process group.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
        except CheckpointException as error:
            # All ranks get the failures of all ranks. The first failure is the cause.
            raise next(failure for failure, _ in error.failures.values()) from error
