"""What one step of the real code holds, computes and sends, of any net: traced without its memory.

The net, its module, optimizer and strategy are made as train.py makes them, on tensors that have
shapes and no numbers (torch's FakeTensorMode), as rank 0 of a process group that sends nothing.
Two steps run: in the first FLOPs and collectives are counted and the optimizer makes its states, of
the second the peak is kept. Of a net of many layers, nets of 6 and of 12 are traced, and what a
layer adds is taken as often as there are more. Kernels are those of a CPU; torch.compile is left
out.
"""

# B batch, T time

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from gptrain.assemble.config_errors import as_config_errors
from gptrain.assemble.datasets import build_dataset, check_sample
from gptrain.assemble.lengths import plan_lengths
from gptrain.assemble.load import build_net
from gptrain.assemble.module import build_module, module_class
from gptrain.core.errors import ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import (
    PIPELINE,
    STRATEGIES,
    ParallelDims,
    parallel_dims,
    strategy_name,
)
from gptrain.lit.strategies import build_strategy
from gptrain.models.hugging_face import config_keys
from gptrain.parallel.placement import (
    allocate,
    build_on_meta_device,
    can_init_by_parameter,
    local_shard,
)
from gptrain.parallel.requirements import check_fit
from gptrain.parallel.strategy import StepMean
from gptrain.plan.counters import COLLECTIVES, FLOPS, Sent

# The stages of a pipeline send each other shapes, which fake tensors cannot do.
TRACED = tuple(name for name, row in STRATEGIES.items() if PIPELINE not in row.axes)
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WEIGHT_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
CPU = torch.device("cpu")
N_SAMPLES = 10**9  # of data that are not read: no run ends within a step
FEW, MORE, MANY = 6, 12, 16  # layers; patterns of them repeat every 2, 3 or 6
LAYERS = ("n_layers", "num_hidden_layers", "num_layers", "n_layer")  # our key, transformers'


def trace(cfg: RunConfig, world_size: int, sample_tokens: int | None) -> dict[str, Any]:
    """The traced step of rank 0, under the config's own strategy.

    Args:
        cfg: checked; trainer.precision is not `auto`.
        sample_tokens: positions of a sample; None: the first sample of data.train is read.

    Returns: {"parameters", "layers", "strategies": {name: {"bytes_per_device", "flops",
        "wire_bytes_per_step", "wire"}}}; flops with what is recomputed. Of `layers` a net was
        traced each; empty: the whole one.
    Raises: ConfigError.
    """
    model = cfg.model.plain()
    groups: dict[str, dict[str, Any]] = {"model": model, "model.config": {}}
    if model["_target_"] == "gptrain.models.HuggingFace":
        with as_config_errors(cfg, "model.path"):
            groups["model.config"] = config_keys(model["config"], model["path"])
    keys = {f"{group}.{name}": keys.get(name) for group, keys in groups.items() for name in LAYERS}
    key, count = next(((k, n) for k, n in keys.items() if isinstance(n, int)), ("", 0))
    if count <= MANY:
        return {**trace_whole(cfg, world_size, sample_tokens), "layers": []}
    few, more = (
        trace_whole(cut(cfg, groups, key, count, n), world_size, sample_tokens) for n in (FEW, MORE)
    )
    times = (count - MORE) / (MORE - FEW)
    return {**along_a_line(few, more, times), "layers": [FEW, MORE, count]}


def cut(cfg: RunConfig, groups: dict, key: str, count: int, n_layers: int) -> RunConfig:
    """The config of a net of n_layers, and of what lists say of each of `count` layers."""
    own = {}
    for name, value in groups["model.config"].items():
        if isinstance(value, list) and len(value) == count:
            own[name] = value[:n_layers]
    group, _, leaf = key.rpartition(".")
    if group == "model":
        return cfg.changed({key: n_layers})
    given = cfg.model.arguments.get("config") or {}
    return cfg.changed({"model.config": {**given, **own, leaf: n_layers}})


def along_a_line(few: Any, more: Any, times: float) -> Any:
    """`more`, and the difference of its numbers to those of `few` so many times besides."""
    if isinstance(more, dict):
        return {key: along_a_line(few.get(key, 0), more[key], times) for key in more}
    return round(more + times * (more - few))


def trace_whole(cfg: RunConfig, world_size: int, sample_tokens: int | None) -> dict[str, Any]:
    """`trace`, of every layer."""
    name = strategy_name(cfg.strategy.name, world_size)
    if name not in TRACED:
        message = f"not traced; traced: {', '.join(TRACED)}"
        raise ConfigError.of("strategy.name", name, message)
    with as_config_errors(cfg, "trainer.devices"):
        dims = parallel_dims(cfg.strategy, world_size)
    if sample_tokens is None:
        sample = build_dataset(cfg, "train")[0]
        sample_tokens = check_sample(cfg, sample) or 1
    else:
        sample = (torch.zeros(sample_tokens, dtype=torch.int64),) * 2
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return Step(cfg, name, dims, sample, sample_tokens).trace()
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        message = f"its step reads the numbers of tensors ({error}), which a traced one has not"
        raise ConfigError.of("model._target_", cfg.model.target, message) from error
    finally:
        dist.destroy_process_group()
        gc.collect()  # FSDP's hooks hold the net in cycles


class Step:
    """A step of rank 0 on batches of a sample. Inside of a FakeTensorMode."""

    def __init__(
        self, cfg: RunConfig, name: str, dims: ParallelDims, sample: Any, sample_tokens: int
    ) -> None:
        self.cfg, self.name, self.dims = cfg, name, dims
        self.precision = str(cfg.trainer.precision)
        with as_config_errors(cfg):
            module_class(cfg, name)
            with unset_fake_temporarily(), as_config_errors(cfg, "model._target_"):
                net = build_on_meta_device(partial(build_net, cfg.model))
            mode = cfg.model.activation_checkpointing
            check_fit(net, cfg.strategy, dims, compile="none", activation_checkpointing=mode)
            self.n_parameters = sum(p.numel() for p in net.parameters())
            net, strategy = build_strategy(
                self.make_net,
                cfg.strategy,
                dims,
                CPU,
                activation_checkpointing=mode,
                precision=self.precision,
            )
            self.strategy = strategy
            self.parallel: Any = strategy.parallel
            lengths = plan_lengths(cfg, N_SAMPLES, sample_tokens, dims.data)
            self.accumulate, size = lengths.batch.accumulate, lengths.batch.batch_size
            with unset_fake_temporarily():  # metrics copy themselves, which takes numbers
                self.module = build_module(cfg, net, lengths, None)
        self.empty_beside(net)
        self.batch = default_collate([sample] * size)
        self.optimizer = self.attach(lengths.n_steps)
        self.is_last = True  # the micro-step after which gradients are reduced
        ddp = self.parallel.ddp_arguments
        self.keeps_gradients = ddp is not None and ddp["gradient_as_bucket_view"]  # between steps
        if ddp is not None:
            self.reduce_as_ddp()

    def make_net(self) -> nn.Module:
        """On the meta device where a strategy fills it by itself; else without numbers here."""
        with unset_fake_temporarily():
            net = build_on_meta_device(partial(build_net, self.cfg.model))
            net.to(WEIGHT_DTYPES.get(self.precision))
        if can_init_by_parameter(net):
            return net
        allocate(net, CPU)
        net.to = lambda *_, **__: net  # it is there, and tensors without numbers are not swapped
        return net

    def empty_beside(self, net: nn.Module) -> None:
        """Takes the numbers from what the module has beside the net."""
        for child in self.module.children():
            if child is not net and any(True for _ in child.parameters()):
                child.to_empty(device=CPU)
        for name, parameter in [*self.module.named_parameters(recurse=False)]:
            setattr(self.module, name, nn.Parameter(torch.empty_like(parameter)))

    def attach(self, n_steps: int | None) -> torch.optim.Optimizer:
        """The module's optimizer, once module and strategy know each other as in a Trainer."""
        module, strategy = self.module, self.strategy
        trainer: Any = SimpleNamespace(
            strategy=strategy,
            accumulate_grad_batches=self.accumulate,
            estimated_stepping_batches=n_steps,
            global_step=0,
            current_epoch=0,
            global_rank=0,
            world_size=self.dims.world_size,
            training=True,
            datamodule=None,
        )
        module.trainer = trainer
        module.log = module.log_dict = lambda *_, **__: None
        strategy.connect(module)
        self.parallel.step_mean = StepMean(self.parallel.data_group, CPU)
        made: Any = module.configure_optimizers()
        while not isinstance(made, torch.optim.Optimizer):  # Lightning's forms with a schedule
            made = made["optimizer"] if isinstance(made, dict) else made[0]
        self.parallel.prepare(module, made)
        return made

    def reduce_as_ddp(self) -> None:
        """DDP's collectives, and its buckets, in which gradients stay between steps.

        DDP's own reducer, in C++, reads the numbers of tensors, which these have not.
        """
        half = self.parallel.sent_dtype

        def reduce(parameter: nn.Parameter) -> None:
            if self.is_last and parameter.grad is not None:
                sent = parameter.grad.to(half) if half else parameter.grad
                dist.all_reduce(sent, group=self.parallel.data_group)

        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce)

    def trace(self) -> dict[str, Any]:
        """See `gptrain.plan.trace.trace`."""
        flops, sent = self.count()
        held = self.held_bytes()
        tracker = MemTracker()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        tracker.track_external(self.module, self.optimizer, *self.parallel.extra_state())
        with tracker:
            for index in range(min(self.accumulate, 2)):
                tracker.reset_mod_stats()  # it follows one pass through a module; peaks stay
                self.micro_step(is_last=index == min(self.accumulate, 2) - 1)
            # torch before 2.13 takes for memory what DTensor computes of shapes while an optimizer
            # steps: there the step's peak is not traced; `total` is then at least what is held.
            is_counted = torch.__version__ >= "2.13"  # TorchVersion compares numbers, not texts
            if is_counted or not self.parallel.is_partitioned:
                self.update()
        peak: dict[Any, int] = tracker.get_tracker_snapshot("peak")[CPU]
        total = max(peak["Total"], sum(held.values()))
        parts = {ref.value: n_bytes for ref, n_bytes in peak.items() if ref != "Total"}
        held |= {"activations": parts["Activation"], "logits": 0}
        # Gathered weights, and what the backward pass of a layer forms for a moment.
        held["buffers"] = max(0, parts["Parameter"] - held["weights"])
        held["buffers"] += parts["Temp"] + parts["Buffer"] + parts["Other"]
        row = {
            "bytes_per_device": held | {"total": total},
            "flops": round(flops),
            "wire_bytes_per_step": round(sum(sent.values())),
            "wire": {what: round(n_bytes) for what, n_bytes in sent.items() if n_bytes},
        }
        return {"parameters": self.n_parameters, "strategies": {self.name: row}}

    def count(self) -> tuple[float, dict[str, float]]:
        """FLOPs and bytes sent of a whole step; of micro-steps that are alike one is run."""
        flops, sent = 0.0, dict.fromkeys(COLLECTIVES, 0.0)
        runs = [(partial(self.micro_step, is_last=True), 1), (self.update, 1)]
        runs += self.parallel.periodic_work()
        if self.accumulate > 1:
            runs.insert(0, (partial(self.micro_step, is_last=False), self.accumulate - 1))
        for run, times in runs:
            with Sent() as comm, FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
                run()
            flops += times * counter.get_total_flops()
            sent = {what: sent[what] + times * n_bytes for what, n_bytes in comm.n_bytes.items()}
        return flops, sent

    def micro_step(self, *, is_last: bool) -> None:
        """Forward and backward."""
        self.is_last = is_last
        hold_back = nullcontext if is_last else self.parallel.without_gradient_sync
        dtype = MIXED.get(self.precision)
        with hold_back():
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                found: Any = self.module.training_step(self.batch, 0)
            loss = found["loss"] if isinstance(found, dict) else found
            (loss / self.accumulate).backward()

    def update(self) -> None:
        """The optimizer's step, with what precedes it."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.parallel.finish_gradients()
        self.parallel.measure_and_clip(parameters, self.cfg.trainer.gradient_clip_val, None)
        self.optimizer.step()

    def held_bytes(self) -> dict[str, float]:
        """Bytes of this rank's weights, gradients and optimizer states, each once."""
        weights = [local_shard(p) for p in self.module.parameters()]
        gradients = [local_shard(p.grad) for p in self.module.parameters() if p.grad is not None]
        states = [t for one in self.optimizer.state.values() for t in one.values()]
        states = [local_shard(t) for t in states if isinstance(t, Tensor) and t.numel() > 1]
        states += self.parallel.extra_state()
        parts = {"weights": weights, "gradients": gradients, "optimizer": states}
        return {name: sum(t.nbytes for t in tensors) for name, tensors in parts.items()}
