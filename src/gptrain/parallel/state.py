"""Names and tensors of net and optimizer in a checkpoint, equal under every strategy.

Names and shapes are those of the unpartitioned net. Each rank saves the tensors or shards that it
holds, and reads the part that it needs. The argument `parameters` of these functions maps the names
to parameters: those of the net, and those of the module outside `net`, which every rank holds in
full. The argument `stages` describes the pipeline over which the net is partitioned.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from gptrain.checkpoints.tensors import SavedTensors
from gptrain.parallel.mesh import gather
from gptrain.parallel.requirements import tied_names

Parameters = Mapping[str, nn.Parameter]
_Shapes = Mapping[str, tuple[int, ...]]
_Values = dict[str, dict[str, Any]]  # name of a parameter -> kind, such as `exp_avg` -> value
# Prefix, in a checkpoint, of the names of a LightningModule's tensors outside `net`.
EXTRA_PREFIX = "module."
NET = "net."
_TABLE = "position_embedding"  # role in tensor_plan
_SHOWN = 8  # largest number of names in a message. A net of another width differs in every tensor


class Stages(NamedTuple):
    """Ranks that hold the stages of a pipeline, and the names of tied parameters.

    Attributes:
        group: Group of the ranks of the pipeline. None under a strategy without stages.
        aliases: Further name of a tied parameter -> its first name, both in the full net. The stage
            of the head holds the parameter only under the further name.
    """

    group: dist.ProcessGroup | None = None
    aliases: Mapping[str, str] = {}


NO_STAGES = Stages()


def saved_name(name: str) -> str:
    """Return the name in a checkpoint of a tensor of a LightningModule.

    `net.head.weight` becomes `head.weight`, and `gain`, outside of the net, `module.gain`.
    """
    return name.removeprefix(NET) if name.startswith(NET) else EXTRA_PREFIX + name


def module_name(name: str) -> str:
    """Return the name in a LightningModule of a tensor of a checkpoint (inverse of saved_name)."""
    return name.removeprefix(EXTRA_PREFIX) if name.startswith(EXTRA_PREFIX) else NET + name


def named_extra_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module outside its `net`, by their names in the module.

    These are all parameters if the module has no `net` that is an nn.Module.
    """
    net = getattr(module, "net", None)
    net_parameters = set(net.parameters()) if isinstance(net, nn.Module) else set()
    return {name: p for name, p in module.named_parameters() if p not in net_parameters}


def named_parameters(net: nn.Module, stages: Stages = NO_STAGES) -> dict[str, nn.Parameter]:
    """Return the parameters of the net that this rank holds, by their names in a checkpoint.

    A tied parameter appears once, under its first name. There is no communication. Frees the full
    weights that FSDP has gathered.

    Args:
        net: Net, full or as the strategy has partitioned it.
        stages: `Parallel.stages` of the strategy. The default is for any net but a pipeline's.
    """
    _reshard(net)
    return {stages.aliases.get(name, name): parameter for name, parameter in net.named_parameters()}


def saved_parameters(module: nn.Module, stages: Stages = NO_STAGES) -> dict[str, nn.Parameter]:
    """Return all parameters of a module that this rank holds, by their names in a checkpoint.

    These are those of `named_parameters` for its `net`, and those outside of the net. A module
    without a net has only the latter.
    """
    net, extra = getattr(module, "net", None), named_extra_parameters(module)
    named = named_parameters(net, stages) if isinstance(net, nn.Module) else {}
    return named | {f"{EXTRA_PREFIX}{name}": parameter for name, parameter in extra.items()}


def optimizer_state(
    parameters: Parameters, optimizer: Optimizer, stages: Stages = NO_STAGES
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names. All ranks of a pipeline must call it.

    Args:
        parameters: All parameters of this rank, by their names in a checkpoint.
        optimizer: Optimizer of the run.
        stages: Stages of the pipeline.

    Returns:
        tensors: Name and kind, such as `head.weight.exp_avg`, -> tensor or shard of this rank.
        values: Name -> kind -> value, for what is no tensor, of all stages.
        param_groups: Groups of all stages, with parameter names in `params`. An option that is a
            tensor with one element, such as a learning rate on the device, becomes a number.

    Raises:
        ValueError: If a parameter of the optimizer has no name in `parameters`.
    """
    names = _names(parameters, optimizer)
    groups = [
        {key: _plain(value) for key, value in options_of(group).items()}
        | {"params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    tensors: dict[str, Tensor] = {}
    values: _Values = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{kind}"] = value
            else:
                values.setdefault(name, {})[kind] = value
    stage_values, stage_groups = zip(*_over_stages((values, groups), stages), strict=True)
    return {
        "tensors": tensors,
        "values": {name: kinds for part in stage_values for name, kinds in part.items()},
        "param_groups": [group for part in stage_groups for group in part],
    }


def _over_stages(value: Any, stages: Stages) -> list[Any]:
    """Gather a picklable value of each stage. Without a pipeline the list holds `value` only."""
    return [value] if stages.group is None else gather(value, stages.group)


@torch.no_grad()
def load_net_state(
    net: nn.Module,
    source: SavedTensors,
    *,
    strict: bool = True,
    resizes: bool = False,
    stages: Stages = NO_STAGES,
    is_module: bool = False,
) -> list[str]:
    """Copy this rank's part of a checkpoint into the net, or into a LightningModule, in place.

    All ranks must call this function if the net is partitioned over a pipeline.

    Args:
        net: Net as the strategy has partitioned it, or LightningModule with it.
        source: Tensors by their names in a checkpoint.
        strict: Raise an error if names or shapes differ. False loads the tensors whose name and
            shape match.
        resizes: Also load tables of learned positions with another number of positions: all saved
            positions into a longer table, and, if not strict, the first ones into a shorter table.
        stages: Stages of the pipeline.
        is_module: True if `net` is a LightningModule. Otherwise tensors whose names begin with
            EXTRA_PREFIX, which are outside of its net, are left out.

    Returns:
        Phrases about position tables that were loaded in part, and one about the tensors that were
        not loaded. Empty if everything was loaded.

    Raises:
        ValueError: If `strict` is true and names or shapes differ. It names the first of them.
    """
    shapes = {n: s for n, s in source.shapes.items() if is_module or not n.startswith(EXTRA_PREFIX)}
    _reshard(net)
    state, further = net.state_dict(), tied_names(net)
    names = {name: saved_name(name) if is_module else name for name in state}
    tensors = {stages.aliases.get(s, s): state[n] for n, s in names.items() if n not in further}
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tables = _find_tables(net, own, shapes) if resizes else {}
    parts = _over_stages((own, tables, [*names.values()]), stages)
    all_own = {name: shape for part, _, _ in parts for name, shape in part.items()}
    all_tables = {name: dim for _, part, _ in parts for name, dim in part.items()}
    all_names = {*all_own, *(name for _, _, names in parts for name in names)}  # also of tied ones
    differing, notes = _compare(all_own, shapes, all_tables, strict)
    differing += [f"{name} only in the net" for name in all_own if name not in shapes]
    differing += [f"{name} only in the checkpoint" for name in shapes if name not in all_names]
    if len(differing) > _SHOWN:
        differing[_SHOWN:] = [f"and {len(differing) - _SHOWN} more"]
    if differing:
        notes.append(f"not loaded: {'; '.join(differing)}")
    if strict and differing:
        raise ValueError("; ".join(differing))
    is_table = {name for name, dim in tables.items() if dim is not None}
    source.read({n: t for n, t in tensors.items() if shapes.get(n) == own[n] or n in is_table})
    if is_module:  # the state dict of a torchmetrics metric does not share its memory
        extra = {name: t for name, t in state.items() if not name.startswith(NET)}
        net.load_state_dict(extra, strict=False)
    return notes


def _compare(
    own: _Shapes, saved: _Shapes, tables: Mapping[str, int | None], strict: bool
) -> tuple[list[str], list[str]]:
    """Return the sizes of tensors that are not loaded, and of tables that are loaded in part."""
    differing, notes = [], []
    for name, shape in own.items():
        old = saved.get(name, shape)
        sizes = f"{name} {old} in the checkpoint, {shape} in the net"
        if old != shape and name not in tables:
            differing.append(sizes)
        elif old != shape and (dim := tables[name]) is not None:  # else the net computes the buffer
            if strict and old[dim] > shape[dim]:
                differing.append(f"{sizes}: model.max_seq_len={old[dim]} keeps all positions")
            else:
                notes.append(f"{sizes}: the first {min(old[dim], shape[dim])} positions are loaded")
    return differing, notes


def _find_tables(net: nn.Module, own: _Shapes, saved: _Shapes) -> dict[str, int | None]:
    """Return name -> dimension of the positions, for tensors that differ in their number only.

    The dimension is None for a buffer, which is not loaded because the net computes it. Without a
    `tensor_plan` a table must not be mistaken for the table of tokens.
    """
    length, plan = getattr(net, "max_seq_len", None), getattr(net, "tensor_plan", None)
    may_be_tokens = length == getattr(net, "vocab_size", None)
    buffers = dict(net.named_buffers())
    tables: dict[str, int | None] = {}
    old_lengths = set()
    for name, shape in own.items():
        old = saved.get(name, shape)
        if len(old) != len(shape) or old == shape:
            continue
        dims = [dim for dim, size in enumerate(shape) if old[dim] != size]
        old_lengths |= {old[dim] for dim in dims}
        owner = name.rpartition(".")[0]
        roles = [role for pattern, role in (plan or {}).items() if fnmatch(owner, pattern)]
        is_table = not may_be_tokens if plan is None else roles[:1] == [_TABLE]
        if all(shape[dim] == length for dim in dims):
            if name in buffers:
                tables[name] = None
            elif len(dims) == 1 and is_table:
                tables[name] = dims[0]
    return tables if plan is not None or len(old_lengths) == 1 else {}


def load_optimizer_state(
    parameters: Parameters, optimizer: Optimizer, source: SavedTensors, state: Mapping[str, Any]
) -> None:
    """Load this rank's part of an optimizer state into the optimizer. It is not collective.

    A parameter for which nothing was saved has no state afterwards, as before the first step.

    Args:
        parameters: All parameters of this rank, by their names in a checkpoint.
        optimizer: Optimizer of the run.
        source: Entry `tensors` of `optimizer_state`, as it was saved.
        state: Entries `values` and `param_groups` of `optimizer_state`.

    Raises:
        ValueError: If a parameter of the optimizer has no name in `parameters`, or if parameters
            that are in one group now were in groups with other options in the saved optimizer.
    """
    names = _names(parameters, optimizer)
    saved: _Values = {name: dict(state["values"].get(name, {})) for name in parameters}
    tensors: dict[str, Tensor] = {}
    for key, shape in source.shapes.items():
        name, _, kind = key.rpartition(".")
        if name in parameters:
            like, dtype = parameters[name].detach(), source.dtypes[key]
            tensor = torch.empty(shape, dtype=dtype)  # a tensor of another shape is read in full
            if shape == tuple(like.shape):
                tensor = torch.empty_like(like, dtype=dtype)
            tensors[key] = saved[name][kind] = tensor
    source.read(tensors)
    saved_groups = state["param_groups"]
    options = {name: options_of(group) for group in saved_groups for name in group["params"]}
    restored: dict[int, dict[str, Any]] = {}
    packed_groups = optimizer.state_dict()["param_groups"]  # with indices for parameters
    for group, packed in zip(optimizer.param_groups, packed_groups, strict=True):
        members = [names[p] for p in group["params"]]
        for name in members:
            if name not in options or options[name] != options.get(members[0]):
                raise ValueError(f"{name}: not in a group with {members[0]} in the saved optimizer")
        packed |= options[members[0]] if members else {}
        restored |= {
            i: saved[n] for i, n in zip(packed["params"], members, strict=True) if saved[n]
        }
    optimizer.load_state_dict({"state": restored, "param_groups": packed_groups})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group of an optimizer: all entries but its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _names(parameters: Parameters, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """Return parameter -> name. Raise a ValueError if a parameter of the optimizer has none."""
    names = {parameter: name for name, parameter in parameters.items()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in names:
            about = f"the optimizer has a parameter {tuple(parameter.shape)}"
            raise ValueError(f"{about} that is no parameter of the module; try: register it there")
    return names


def _plain(value: Any) -> Any:
    """Return a number in place of a tensor with one element, also in a tuple or a list."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _reshard(net: nn.Module) -> None:
    """Free the full weights that FSDP still holds after an evaluation, and keep only the shards."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
