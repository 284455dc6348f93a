"""Names and tensors of net and optimizer in a checkpoint, equal under every strategy.

Names and shapes are those of the unpartitioned net. Each rank saves the tensors or shards that it
holds, and reads the part that it needs. The argument `parameters` of these functions maps the names
to parameters: those of the net, and those of the module outside `net`, which every rank holds in
full.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

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


def saved_name(name: str) -> str:
    """Return the name in a checkpoint of a tensor of a LightningModule.

    `net.head.weight` becomes `head.weight`, and `gain`, outside of the net, `module.gain`.
    """
    return name.removeprefix(NET) if name.startswith(NET) else EXTRA_PREFIX + name


def module_name(name: str) -> str:
    """Return the name in a LightningModule of a tensor of a checkpoint (inverse of saved_name)."""
    return name.removeprefix(EXTRA_PREFIX) if name.startswith(EXTRA_PREFIX) else NET + name


def named_extra_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module outside its `net`, by their names in the module."""
    return {name: p for name, p in module.named_parameters() if not name.startswith(NET)}


def optimizer_state(
    parameters: Parameters, optimizer: Optimizer, stage_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return the optimizer's state by parameter names. All ranks of a pipeline must call it.

    Args:
        parameters: All parameters of this rank, by their names in a checkpoint.
        optimizer: Optimizer of the run.
        stage_group: Ranks of the pipeline. None without a pipeline.

    Returns:
        tensors: Name and kind, such as `head.weight.exp_avg`, -> tensor or shard of this rank.
        values: Name -> kind -> value, for what is no tensor, of all stages.
        param_groups: Groups of all stages, with parameter names in `params`. An option that is a
            tensor with one element, such as a learning rate on the device, becomes a number.

    Raises:
        ValueError: If a parameter of the optimizer has no name in `parameters`.
    """
    groups = [
        {**tree_map_only(Tensor, _plain, options_of(group)), "params": names}
        for group, names in zip(optimizer.param_groups, _names(parameters, optimizer), strict=True)
    ]
    tensors: dict[str, Tensor] = {}
    values: _Values = {}
    for name, parameter in parameters.items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{kind}"] = value
            else:
                values.setdefault(name, {})[kind] = value
    own = (values, groups)
    stages = [own] if stage_group is None else gather(own, stage_group)
    return {
        "tensors": tensors,
        "values": {name: kinds for values, _ in stages for name, kinds in values.items()},
        "param_groups": [group for _, groups in stages for group in groups],
    }


@torch.no_grad()
def load_net_state(
    net: nn.Module,
    source: SavedTensors,
    *,
    full_net: nn.Module | None = None,
    strict: bool = True,
    resizes: bool = False,
    is_module: bool = False,
) -> list[str]:
    """Copy this rank's part of a checkpoint into the net, or into a LightningModule, in place.

    It is not collective.

    Args:
        net: Net as the strategy has partitioned it, or LightningModule with it.
        source: Tensors by their names in a checkpoint.
        full_net: Net before it was partitioned. None if this rank has all of it in `net`.
        strict: Raise an error if names or shapes differ. False loads the tensors whose name and
            shape match.
        resizes: Also load tables of learned positions with another number of positions: all saved
            positions into a longer table, and, if not strict, the first ones into a shorter table.
        is_module: True if `net` is a LightningModule. Otherwise tensors whose names begin with
            EXTRA_PREFIX, which are outside of its net, are left out.

    Returns:
        Phrases about position tables that were loaded in part, and one about the tensors that were
        not loaded. Empty if everything was loaded.

    Raises:
        ValueError: If `strict` is true and names or shapes differ. It names the first of them.
    """
    full_net = net if full_net is None else full_net
    saved = {n: s for n, s in source.shapes.items() if is_module or not n.startswith(EXTRA_PREFIX)}
    reshard(net)
    state = net.state_dict()
    held = {saved_name(name) if is_module else name: tensor for name, tensor in state.items()}
    # A stage of a pipeline holds some of the tensors. A tied one is saved under its first name.
    tensors = full_net.state_dict() | held
    further = tied_names(full_net).keys() | (map(saved_name, tied_names(net)) if is_module else ())
    own = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in further}
    tables = _find_tables(full_net, own, saved) if resizes else {}
    differing, notes = _compare(own, saved, tables, strict)
    differing += [f"{name} only in the net" for name in own if name not in saved]
    differing += [f"{name} only in the checkpoint" for name in saved if name not in tensors]
    # A file of torch.save has a tied tensor under both names.
    ties = {n: first for n, first in tied_names(full_net).items() if {n, first} <= saved.keys()}
    both = {n: torch.empty(saved[n], dtype=source.dtypes[n]) for n in {*ties, *ties.values()}}
    source.read(both)
    unequal = (n for n, first in ties.items() if not torch.equal(both[n], both[first]))
    differing += [f"{n} is {ties[n]} only in the net" for n in unequal]
    if len(differing) > _SHOWN:
        differing[_SHOWN:] = [f"and {len(differing) - _SHOWN} more"]
    if differing:
        notes.append(f"not loaded: {'; '.join(differing)}")
    if strict and differing:
        raise ValueError("; ".join(differing))
    read = {n for n, s in own.items() if saved.get(n) == s or tables.get(n) is not None}
    source.read({name: tensor for name, tensor in held.items() if name in read})
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
    groups = _names(parameters, optimizer)
    packed_groups = optimizer.state_dict()["param_groups"]  # with indices for parameters
    for names, packed in zip(groups, packed_groups, strict=True):
        for name in names:
            if name not in options or options[name] != options.get(names[0]):
                raise ValueError(f"{name}: not in a group with {names[0]} in the saved optimizer")
        packed |= options[names[0]] if names else {}
    restored = {i: saved[name] for i, name in enumerate(chain(*groups)) if saved[name]}
    optimizer.load_state_dict({"state": restored, "param_groups": packed_groups})


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group of an optimizer: all entries but its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _names(parameters: Parameters, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters of each group. A ValueError if one has no name."""
    names = {parameter: name for name, parameter in parameters.items()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in names:
            about = f"the optimizer has a parameter {tuple(parameter.shape)}"
            raise ValueError(f"{about} that is no parameter of the module; try: register it there")
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _plain(tensor: Tensor) -> Any:
    """Return a number in place of a tensor with one element."""
    return tensor.item() if tensor.numel() == 1 else tensor


def reshard(net: nn.Module) -> None:
    """Free the full weights that FSDP still holds after an evaluation, and keep only the shards."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
