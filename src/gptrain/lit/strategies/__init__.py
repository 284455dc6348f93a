"""Lightning's side of each strategy; the work itself is done by gptrain.parallel."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptrain.lit.strategies.ranks import Replicated, Single
from gptrain.loss import chunked_next_token_loss, next_token_loss
from gptrain.parallel.activation import (
    apply_activation_checkpointing,
    apply_compile,
    compiles_loss,
)
from gptrain.parallel.ddp import comm_hook
from gptrain.parallel.fit import Unfit
from gptrain.parallel.mesh import start_group_of_one
from gptrain.parallel.slices import build_partitioned

_DDP_OPTIONS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = (  # renamed in torch 2.13
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
)


def spread_net(
    make_net: Callable[[], nn.Module],
    options,
    split,
    device: torch.device,
    *,
    compile: str = "none",
    activation_checkpointing: str = "none",
    precision: str = "32-true",
) -> tuple[nn.Module, Strategy]:
    """The net as this rank holds it, with the weights of a single process, and its strategy.

    `strategy.told` says what the net was before: `net_name` and `n_parameters`, with the strategy's
    `name`.

    The process group exists already where there are several ranks.

    Args:
        make_net: draws the net's seed from torch's CPU generator.
        options: the `strategy` group.   split: the degrees of its axes.
        precision: Lightning's name; under "bf16-mixed" FSDP gathers weights in bf16.
    Raises: Unfit if the net lacks what the strategy needs, or options do not combine.
    """
    name = options.name
    if name == "auto":
        name = "single" if split.world_size == 1 else "ddp"
    told: dict[str, Any] = {}

    def make_and_look() -> nn.Module:
        net = make_net()
        told["net_name"] = type(net).__name__  # FSDP changes the class, a pipeline cuts the net
        told["n_parameters"] = sum(parameter.numel() for parameter in net.parameters())
        return net

    net, strategy = _spread(
        name, make_and_look, options, split, device, compile, activation_checkpointing, precision
    )
    strategy.told = {"name": name, **told}
    return net, strategy


def _spread(name, make_net, options, split, device, compile, activation_checkpointing, precision):
    def finish(net: nn.Module) -> None:
        apply_activation_checkpointing(net, activation_checkpointing)
        apply_compile(net, compile)

    if name == "single":
        return build_partitioned(make_net, finish, device), Single(device)
    if split.world_size == 1:
        start_group_of_one(device)
    if name == "ddp":
        return build_partitioned(make_net, finish, device), _replicated(options)
    if precision == "16-mixed":
        raise Unfit("trainer.precision", f"{name} does not scale losses; use bf16-mixed")
    if compile == "model":
        raise Unfit(
            "model.compile",
            f"under {name} collectives and hooks lie between the blocks; use blocks",
        )
    if "tensor" in name and compile != "none" and activation_checkpointing != "none":
        raise Unfit(
            "model.compile",
            f"under {name} torch cannot compile what is recomputed from cut weights; use none, or "
            f"activation_checkpointing=none",
        )
    if "pipeline" in name:
        return _piped(make_net, finish, options, split, device, compiles_loss(compile, device.type))
    return _sharded(make_net, finish, options, split, device, name, precision)


def _replicated(options) -> Strategy:
    state, hook = comm_hook(options.comm_hook) or (None, None)
    return Replicated(
        timeout=timedelta(seconds=options.timeout_s),
        ddp_comm_state=state,
        ddp_comm_hook=hook,
        **{_SYNC_BUFFERS: False},  # ours are constants
        bucket_cap_mb=options.bucket_cap_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
    )


def _sharded(make_net, finish, options, split, device, name, precision):
    from gptrain.lit.strategies.spread import Sharded
    from gptrain.parallel.fsdp import apply_fsdp
    from gptrain.parallel.mesh import build_mesh
    from gptrain.parallel.tensor import apply_tensor_parallel

    mesh = build_mesh(device.type, data=split.data, tensor=split.tensor)
    is_fsdp, is_tensor = "fsdp" in name, "tensor" in name

    def spread(net: nn.Module) -> None:
        if is_tensor:
            apply_tensor_parallel(net, mesh)
        finish(net)
        if is_fsdp:
            apply_fsdp(
                net,
                mesh,
                reshard_after_forward=options.reshard_after_forward,
                compute_dtype=torch.bfloat16 if precision == "bf16-mixed" else None,
                cpu_offload=options.cpu_offload,
            )

    offloads = is_fsdp and options.cpu_offload
    net = build_partitioned(make_net, spread, "cpu" if offloads else device)
    syncs_each = options.accumulate_shards
    return net, Sharded(mesh, is_fsdp=is_fsdp, is_tensor=is_tensor, syncs_each=syncs_each)


def _piped(make_net, finish, options, split, device, compiles):
    from gptrain.lit.strategies.spread import Piped
    from gptrain.parallel.mesh import build_mesh
    from gptrain.parallel.pipeline import Pipeline, count_microbatches

    mesh = build_mesh(device.type, data=split.data, pipeline=split.pipeline)
    pipelines = []

    def spread(net: nn.Module) -> None:
        def loss_sum(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if net.head.bias is not None:
                return next_token_loss(net.head(hidden), targets, reduction="sum")
            return chunked_next_token_loss(
                hidden, net.head.weight, targets, reduction="sum", compiles=compiles
            )

        pipeline = Pipeline(
            net,
            mesh,
            schedule=options.schedule,
            microbatches=count_microbatches(options, split),
            loss_sum=loss_sum,
        )
        pipelines.append(pipeline)
        finish(net)

    net = build_partitioned(make_net, spread, device)
    return net, Piped(pipelines[0])
