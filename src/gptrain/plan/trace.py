"""Memory, FLOPs and traffic of one step of any net, traced on tensors without data.

The net, its LightningModule, the optimizer and the strategy are built as train.py builds them.
Their tensors have shapes but no data (torch's FakeTensorMode), and the process is rank 0 of a
process group that sends nothing. Two steps run. The first step counts FLOPs and collectives, and
the optimizer allocates its states. The second step gives the peak of the memory.

Models with more than 16 layers are traced with 6 and with 12 layers, and the result is extrapolated
linearly. Kernels are those of a CPU. torch.compile is not traced.
"""

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
from gptrain.core.precision import find_precision
from gptrain.core.schema import RunConfig
from gptrain.core.strategies import PIPELINE, STRATEGIES, ParallelDims, parallel_dims, strategy_name
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
from gptrain.runtime.process import count_nodes

# Strategies without a pipeline: stages exchange the shapes of tensors as data, which fake tensors
# do not have.
TRACED = tuple(name for name, row in STRATEGIES.items() if PIPELINE not in row.axes)
CPU = torch.device("cpu")
N_SAMPLES = 10**9  # assumed size of a dataset that is not read, so that no run ends within a step
# Models with more than MANY layers are traced with FEW and with MORE layers. Both are multiples of
# 2, 3 and 6, after which patterns of layers repeat.
FEW, MORE, MANY = 6, 12, 16
# Keys of the number of layers: gptrain's, and those of configs of transformers.
LAYERS = ("n_layers", "num_hidden_layers", "num_layers", "n_layer")


def trace(cfg: RunConfig, world_size: int, sample_tokens: int | None) -> dict[str, Any]:
    """Trace a step of rank 0 under the strategy of the config, on tensors without data.

    Args:
        cfg: Checked configuration. `trainer.precision` is not `auto`.
        world_size: Number of ranks.
        sample_tokens: Tokens per sample. None to read the first sample of data.train.

    Returns:
        parameters: Number of parameters.
        layers: [6, 12, number of layers] if the result is extrapolated from nets of 6 and of 12
            layers, because the net has more than 16, else an empty list.
        strategies: {name: {"bytes_per_device", "flops", "wire_bytes_per_step", "wire"}} with the
            name of the strategy: bytes by part and in `total`, FLOPs with recomputation and the
            update, bytes that this rank sends, and the same by kind of collective.

    Raises:
        ConfigError: If the strategy has a pipeline, or if the step cannot run without data.
    """
    model = cfg.model.plain()
    groups: dict[str, dict[str, Any]] = {"model": model, "model.config": {}}
    if model["_target_"] == "gptrain.models.HuggingFace":
        with as_config_errors(cfg, "model.path"):
            groups["model.config"] = config_keys(model["config"], model["path"])
    keys = {f"{group}.{name}": keys.get(name) for group, keys in groups.items() for name in LAYERS}
    key, count = next(((k, n) for k, n in keys.items() if isinstance(n, int)), ("", 0))
    if count <= MANY:
        return {**trace_all_layers(cfg, world_size, sample_tokens), "layers": []}
    few, more = (
        trace_all_layers(with_layers(cfg, groups, key, count, n), world_size, sample_tokens)
        for n in (FEW, MORE)
    )
    times = (count - MORE) / (MORE - FEW)
    return {**extrapolate(few, more, times), "layers": [FEW, MORE, count]}


def with_layers(cfg: RunConfig, groups: dict, key: str, count: int, n_layers: int) -> RunConfig:
    """Return the config of the same net with fewer layers.

    Lists in a config of transformers with one value per layer are shortened as well.

    Args:
        cfg: Configuration of the run.
        groups: Values of `model` and of `model.config`.
        key: Dotted key of the number of layers.
        count: Number of layers of the net.
        n_layers: Number of layers of the result.
    """
    lists = {}
    for name, value in groups["model.config"].items():
        if isinstance(value, list) and len(value) == count:
            lists[name] = value[:n_layers]
    group, _, leaf = key.rpartition(".")
    if group == "model":
        return cfg.changed({key: n_layers})
    given = cfg.model.arguments.get("config") or {}
    return cfg.changed({"model.config": {**given, **lists, leaf: n_layers}})


def extrapolate(few: Any, more: Any, times: float) -> Any:
    """Return more + times * (more - few), for each number in nested dicts.

    Args:
        few: Numbers for the net with fewer layers. A missing number counts as 0.
        more: Numbers for the net with more layers.
        times: Number of times that the difference of the two nets is added.
    """
    if isinstance(more, dict):
        return {key: extrapolate(few.get(key, 0), more[key], times) for key in more}
    return round(more + times * (more - few))


def trace_all_layers(cfg: RunConfig, world_size: int, sample_tokens: int | None) -> dict[str, Any]:
    """Trace a step of a net with all of its layers.

    Makes a process group for the time of the call, so this process must not be in another one.

    Args:
        cfg: Checked configuration. `trainer.precision` is not `auto`.
        world_size: Number of ranks.
        sample_tokens: Tokens per sample. None to read the first sample of data.train.

    Returns:
        The entries `parameters` and `strategies` of the result of `trace`.

    Raises:
        ConfigError: If the strategy has a pipeline, if its numbers of ranks do not multiply to
            `world_size`, or if the step needs the values of tensors.
    """
    name = strategy_name(cfg.strategy.name, world_size)
    if name not in TRACED:
        message = f"not traced; traced: {', '.join(TRACED)}"
        raise ConfigError.of("strategy.name", name, message)
    with as_config_errors(cfg, "trainer.devices"):
        n_nodes = count_nodes(cfg.trainer.num_nodes)
        dims = parallel_dims(cfg.strategy, world_size, n_nodes)
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
        message = f"the step reads values of tensors ({error}), but traced tensors have no data"
        raise ConfigError.of("model._target_", cfg.model.target, message) from error
    finally:
        dist.destroy_process_group()
        gc.collect()  # FSDP's hooks form reference cycles with the net


class TrainedMemTracker(MemTracker):
    """torch's MemTracker, for modules of which some parameters are frozen."""

    def _track_module_params_and_buffers(
        self, module: nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        # MemTracker registers gradient hooks, which a frozen parameter refuses.
        no_hook = SimpleNamespace(remove=lambda: None)
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles.setdefault(parameter, (no_hook, no_hook))
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


class Step:
    """A training step of rank 0 on fake tensors. It is built and run inside a FakeTensorMode.

    Args:
        cfg: Checked configuration.
        name: Name of the strategy.
        dims: Number of ranks along each axis.
        sample: Sample of the dataset. Every batch consists of copies of this sample.
        sample_tokens: Tokens per sample.

    Raises:
        ConfigError: If the net, the module or the strategy does not fit the config.
    """

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
            check_fit(
                net,
                cfg.strategy,
                dims,
                compile="none",
                activation_checkpointing=mode,
                documents=cfg.data.masks_documents,
            )
            self.n_parameters = sum(p.numel() for p in net.parameters())
            net, self.strategy = build_strategy(
                self.make_net,
                cfg.strategy,
                dims,
                CPU,
                activation_checkpointing=mode,
                precision=self.precision,
                n_nodes=count_nodes(cfg.trainer.num_nodes),
            )
            self.parallel: Any = self.strategy.parallel
            lengths = plan_lengths(cfg, N_SAMPLES, sample_tokens, dims.data)
            self.accumulate, size = lengths.batch.accumulate, lengths.batch.batch_size
            with unset_fake_temporarily():  # metrics are deep-copied, which needs real tensors
                self.module = build_module(cfg, net, lengths, None)
        self.make_extra_parameters_fake(net)
        self.batch = default_collate([sample] * size)
        self.optimizer = self.attach(lengths.n_steps)
        self.is_last = True  # gradients are reduced after the last micro-step
        ddp = self.parallel.ddp_arguments
        # DDP's buckets keep the gradients between steps.
        self.keeps_gradients = ddp is not None and ddp["gradient_as_bucket_view"]
        if ddp is not None:
            self.reduce_as_ddp()

    def make_net(self) -> nn.Module:
        """Build the net without memory for its values, and return it.

        The net is on the meta device if each parameter can be initialized alone. Otherwise its
        parameters are fake tensors on the CPU.
        """
        with unset_fake_temporarily():
            net = build_on_meta_device(partial(build_net, self.cfg.model))
            if (weights := find_precision(self.precision).weights) != "float32":
                net.to(getattr(torch, weights))
        if can_init_by_parameter(net):
            return net
        allocate(net, CPU)
        # The net is already on its device, and fake tensors cannot be moved.
        net.to = lambda *_, **__: net
        return net

    def make_extra_parameters_fake(self, net: nn.Module) -> None:
        """Replace the module's parameters outside of `net` with fake tensors of equal shape.

        Args:
            net: Net, whose parameters are fake already.
        """
        for child in self.module.children():
            if child is not net and any(True for _ in child.parameters()):
                child.to_empty(device=CPU)
        for name, parameter in [*self.module.named_parameters(recurse=False)]:
            setattr(self.module, name, nn.Parameter(torch.empty_like(parameter)))

    def attach(self, n_steps: int | None) -> torch.optim.Optimizer:
        """Connect the module with the strategy, as a Trainer does, and return its optimizer.

        The module gets a stand-in for a Trainer, and its `log` and `log_dict` do nothing then.

        Args:
            n_steps: Optimizer steps of the run, for the schedule. None if the number is unknown.
        """
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
        optimizer: Any = module.configure_optimizers()
        while not isinstance(optimizer, torch.optim.Optimizer):  # a dict or list with a schedule
            optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer[0]
        self.parallel.prepare(module, optimizer)
        return optimizer

    def reduce_as_ddp(self) -> None:
        """Register hooks that all-reduce each gradient as DDP does.

        DDP's own reducer is C++ code that reads the data of tensors. Fake tensors have none.
        """
        sent_dtype = self.parallel.sent_dtype

        def reduce(parameter: nn.Parameter) -> None:
            if self.is_last and parameter.grad is not None:
                sent = parameter.grad.to(sent_dtype) if sent_dtype else parameter.grad
                dist.all_reduce(sent, group=self.parallel.data_group)

        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce)

    def trace(self) -> dict[str, Any]:
        """Run two steps, and return the size of the net and the estimate for rank 0.

        Returns:
            The entries `parameters` and `strategies` of the result of the function `trace`: FLOPs
            and bytes sent in a whole optimizer step, and the peak of the memory by part and in
            `total`.
        """
        flops, sent = self.count()
        held = self.held_bytes()
        tracker = TrainedMemTracker()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        tracker.track_external(self.module, self.optimizer)
        with tracker:
            for index in range(min(self.accumulate, 2)):
                tracker.reset_mod_stats()  # MemTracker expects one forward pass per module
                self.micro_step(is_last=index == min(self.accumulate, 2) - 1)
            # torch before 2.13 counts tensors that DTensor uses to compute shapes in an optimizer's
            # step as memory. The update is not traced there, and `total` is at least the states.
            has_exact_update = torch.__version__ >= "2.13"  # TorchVersion compares numbers
            if has_exact_update or not self.parallel.is_partitioned:
                self.update()
        peak: dict[Any, int] = tracker.get_tracker_snapshot("peak")[CPU]
        total = max(peak["Total"], sum(held.values()))
        parts = {ref.value: n_bytes for ref, n_bytes in peak.items() if ref != "Total"}
        held |= {"activations": parts["Activation"], "logits": 0}
        # Gathered weights, and temporary tensors of the backward pass.
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
        """Run one step and return its FLOPs, and the bytes that each kind of collective sends.

        Micro-steps before the last are equal. One of them runs, and its counts are multiplied.
        """
        flops, sent = 0.0, dict.fromkeys(COLLECTIVES, 0.0)
        runs = [(partial(self.micro_step, is_last=True), 1), (self.update, 1)]
        if self.accumulate > 1:
            runs.insert(0, (partial(self.micro_step, is_last=False), self.accumulate - 1))
        for run, times in runs:
            with Sent() as comm, FlopCounterMode(display=False, custom_mapping=FLOPS) as counter:
                run()
            flops += times * counter.get_total_flops()
            sent = {what: sent[what] + times * n_bytes for what, n_bytes in comm.n_bytes.items()}
        return flops, sent

    def micro_step(self, *, is_last: bool) -> None:
        """Run the forward and the backward pass of one micro-batch.

        Args:
            is_last: True for the last micro-step of a step, after which gradients are reduced.
        """
        self.is_last = is_last
        gradient_sync = nullcontext if is_last else self.parallel.without_gradient_sync
        autocast = find_precision(self.precision).autocast
        with gradient_sync():
            with torch.autocast("cpu", getattr(torch, autocast)) if autocast else nullcontext():
                output: Any = self.module.training_step(self.batch, 0)
            loss = output["loss"] if isinstance(output, dict) else output
            (loss / self.accumulate).backward()

    def update(self) -> None:
        """Finish and clip the gradients, and run the optimizer's step."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.parallel.finish_gradients()
        self.parallel.measure_and_clip(parameters, self.cfg.trainer.gradient_clip_val, None)
        self.optimizer.step()

    def held_bytes(self) -> dict[str, float]:
        """Return the bytes of this rank's `weights`, `gradients` and `optimizer` states.

        The optimizer's states leave out tensors of one element, such as step counters.
        """
        weights = [local_shard(p) for p in self.module.parameters()]
        gradients = [local_shard(p.grad) for p in self.module.parameters() if p.grad is not None]
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        states = [local_shard(t) for t in states if isinstance(t, Tensor) and t.numel() > 1]
        parts = {"weights": weights, "gradients": gradients, "optimizer": states}
        return {name: sum(t.nbytes for t in tensors) for name, tensors in parts.items()}
