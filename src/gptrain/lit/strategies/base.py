"""What every strategy of ours adds to Lightning's: its steps and checkpoints by `parallel`.

In a file the net's tensors have the bare net's names, and what a module holds beside its net has
`module.` in front. Within Lightning's hooks a checkpoint has Lightning's own names, so that
callbacks that copy a module (EMA) find what they would find in any Lightning project.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torchmetrics import Metric

from gptrain.checkpoints import amendment
from gptrain.checkpoints.manifest import STATE_NAME
from gptrain.checkpoints.rng import capture
from gptrain.checkpoints.safe_load import SafeFileSystemReader, ShardWriter, load_file
from gptrain.data.samples import count_batch_targets
from gptrain.lit.strategies.saved_names import NET, from_saved_names, to_saved_names
from gptrain.parallel import state as states
from gptrain.parallel.requirements import IncompatibleModelError
from gptrain.parallel.strategy import ParallelStrategy, StepMean

INDEX_NAME = ".metadata"  # of torch.distributed.checkpoint: there in sharded checkpoints alone
ONE_OPTIMIZER = (
    "steps, schedule and checkpoints of a run are those of one optimizer in Lightning's loop; "
    "give one optimizer groups with options of their own"
)


@dataclass(frozen=True)
class StrategyInfo:
    """What a strategy was asked for, and the net before it was partitioned."""

    name: str
    net_name: str
    n_parameters: int
    n_matrix_weights: int


class LightningStrategy(Strategy):
    """Mixed in front of one of Lightning's strategies; what it computes `parallel` does.

    A sharded save keeps tensors in the ranks' own files; what is left, counters and options, is in
    the same file as that of a whole one. Either is read whatever this strategy itself would write.

    Args:
        parallel: partitions and trains the net.   more: of Lightning's strategy.

    Attributes:
        info: what it was made for.
        check_finite: called once the norm is known, before the optimizer's step; may raise
            NonFiniteError.
        grad_norm: of all gradients before clipping, of the last step.
        micro_steps: arguments of training_step, and random numbers, of this step's micro-steps.
        micro_losses: what training_step returned in each micro-step of this step, detached.
        correction: what the gradients of this step were multiplied by: 1 but where training_step
            gave its loss other targets than the batch has.
        saves_to_store: what is being saved is one of our checkpoints, not a file of Lightning's.
        saved: fingerprints of what a validation may amend: of the state file of rank 0, and of this
            rank's own files. None where the newest save needs no amendment.
        is_updating: the optimizer may have changed some parameters and not yet the others.
        fresh_options: of the optimizer's groups as they were built, before a checkpoint's.
    """

    info: StrategyInfo
    check_finite: Callable[[pl.Trainer, Optimizer], None] | None = None
    grad_norm: Tensor | None = None
    correction: Tensor | float = 1.0
    saves_to_store = is_updating = False
    saved: tuple[amendment.Fingerprints, amendment.Fingerprints] | None = None
    has_replicas = False  # a save has files of replicas of the net
    step_mean: StepMean
    micro_losses: list[Tensor]
    micro_steps: list[tuple[Any, Any, dict[str, Any]]]
    fresh_options: list[dict[str, Any]]
    _gradients_finished = False  # those of this step
    _loaded: Path

    def __init__(self, parallel: ParallelStrategy, *more: Any, **options: Any):
        super().__init__(*more, **options)
        self.parallel = parallel

    @property
    def module(self) -> pl.LightningModule:
        """What is trained."""
        return cast(pl.LightningModule, self.lightning_module)

    @property
    def net(self) -> nn.Module:
        """Its net."""
        return self.module.get_submodule("net")

    # Steps

    def setup_optimizers(self, trainer: Any) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise IncompatibleModelError(
                "module._target_", f"several optimizers: {ONE_OPTIMIZER}"
            ) from error
        for optimizer in self.optimizers:
            self.parallel.prepare(self.module, optimizer)
        self.parallel.accumulate = trainer.accumulate_grad_batches
        self.step_mean = StepMean(self.parallel.data_group, self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a step: how many targets its micro-batches have, over all data ranks."""
        trainer = self.module.trainer
        if batch_idx % trainer.accumulate_grad_batches:
            return
        loader = trainer.train_dataloader
        if ahead := getattr(loader, "step_targets", None):
            self.step_mean.compute_divisor(ahead.pop(0) or 0, getattr(loader, "read_ahead", 1))
        else:  # not our loader: as if the other micro-batches had as many
            self.step_mean.compute_divisor(count_batch_targets(batch) or 0, 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Drop the last step's gradients before a new step's forward pass.

        Lightning drops them after it, which costs 4 bytes per parameter at the peak of memory.
        """
        trainer = self.module.trainer
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self.micro_losses, self.micro_steps = [], []
            self._gradients_finished = False
            self.step_mean.reset_counts()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self.parallel.step_mean = self.step_mean
        self.micro_steps.append((args, kwargs, capture()))
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self.parallel.step_mean = None

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.micro_losses.append(closure_loss.detach())
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def clip(self, optimizer: Optimizer, max_norm: float | None) -> None:
        """Scale all gradients to a norm of at most max_norm.   Raises: NonFiniteError."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = None
        if not self._gradients_finished:  # called again by a module that clips in its own way
            self.parallel.finish_gradients()
            self.correction = scale = self.step_mean.correction()
            self._gradients_finished = True
        self.grad_norm = self.parallel.measure_and_clip(parameters, max_norm, scale)
        if self.check_finite is not None:
            self.check_finite(self.module.trainer, optimizer)
        self.is_updating = True  # until the step is counted, see Steps.on_train_batch_end

    def step_loss(self) -> Tensor:
        """Mean over this rank's micro-steps of what training_step returned, of the last step."""
        n_accumulated = self.module.trainer.accumulate_grad_batches  # divided by already
        return torch.stack(self.micro_losses).mean() * n_accumulated * self.correction

    # Checkpoints

    @property
    def _writes_shards(self) -> bool:
        """Whether this save leaves the net's tensors to `ShardWriter`."""
        return self.parallel.is_partitioned and self.saves_to_store

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Name in a checkpoint -> parameter, each once."""
        return states.saved_parameters(self.module, self.parallel.stages)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state on rank 0; in a sharded save what lies beside the net alone."""
        state = super().lightning_module_state_dict()
        if not self.parallel.is_partitioned:
            return state
        beside = {name: value for name, value in state.items() if not name.startswith(NET)}
        if self._writes_shards:
            return beside
        net = states.full_net_state(self.net, self.parallel.stages)
        return {f"{NET}{name}": tensor for name, tensor in net.items()} | beside

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by names; in a sharded save the options of its groups alone."""
        parameters, stages = self.saved_parameters(), self.parallel.stages
        if self._writes_shards:
            groups = states.named_groups(parameters, optimizer, stages)
            return {"state": {}, "param_groups": groups}
        return states.full_optimizer_state(parameters, optimizer, stages)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write Lightning's file, or a checkpoint of our store.

        Args:
            storage_options: The draft of a checkpoint, or a dict that takes the file of an
                amendment. None writes Lightning's file.
        """
        amends = self.saves_to_store and isinstance(storage_options, dict)
        if self._writes_shards and not amends:
            dcp.save(self.own_state(), storage_writer=ShardWriter(storage_options))
        checkpoint["state_dict"] = to_saved_names(checkpoint["state_dict"])
        if storage_options is None:
            super().save_checkpoint(checkpoint, filepath)
            return
        if amends and self.saved is not None:
            if self.is_global_zero:
                storage_options[amendment.NAME] = amendment.amend(checkpoint, self.saved[0])
            return
        if self.is_global_zero:
            with storage_options.open(STATE_NAME) as file:
                torch.save(checkpoint, file)
        self.saved = None
        if not checkpoint["validated"]:
            self.note_saved(checkpoint)

    def own_state(self) -> Any:
        """Return what this rank writes into files of its own; empty where it shares them all."""
        if not self.parallel.is_partitioned:
            return {}
        parameters, stages = self.saved_parameters(), self.parallel.stages
        return states.sharded_state(self.net, parameters, self.optimizers[0], stages)

    def note_saved(self, checkpoint: Any) -> None:
        """Take fingerprints of a save that `save_checkpoint` may amend after a validation."""
        of_file = amendment.fingerprints(checkpoint) if self.is_global_zero else {}
        self.saved = of_file, amendment.fingerprints(self.own_state())

    def is_as_saved(self) -> bool:
        """Whether this rank's own files need not be written again; all ranks must agree."""
        return self.saved is not None and amendment.is_unchanged(self.own_state(), self.saved[1])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Tensors, on the CPU, and plain values; of a checkpoint's folder, or a file."""
        self._loaded = path = Path(checkpoint_path)
        checkpoint = amendment.load_state(path) if path.is_dir() else load_file(path)
        checkpoint["state_dict"] = from_saved_names(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        reader, state = self._reader(), checkpoint["state_dict"]
        if reader is None and not self.parallel.is_partitioned:
            super().load_model_state_dict(checkpoint, strict)
            return
        net = {n.removeprefix(NET): t for n, t in state.items() if n.startswith(NET)}
        states.load_net_state(self.net, reader or net, stages=self.parallel.stages)
        beside = {name: value for name, value in state.items() if not name.startswith(NET)}
        missing, unexpected = self.module.load_state_dict(beside, strict=False)
        lost = [name for name in missing if not name.startswith(NET)] + list(unexpected)
        if lost and strict:
            raise ValueError(f"{self._loaded} does not fit the module beside its net: {lost}")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        optimizer, state = self.optimizers[0], checkpoint["optimizer_states"][0]
        self.fresh_options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        source, parameters = self._reader() or state["state"], self.saved_parameters()
        states.load_optimizer_state(parameters, optimizer, source, state["param_groups"])
        groups = optimizer.param_groups  # of a pipeline's stage there may be fewer
        for schedule in checkpoint["lr_schedulers"]:
            if len(schedule.get("base_lrs", groups)) != len(groups):
                schedule["base_lrs"] = [group["initial_lr"] for group in groups]
                schedule["_last_lr"] = [group["lr"] for group in groups]
                schedule |= {"lr_lambdas": []} if "lr_lambdas" in schedule else {}

    def _reader(self) -> SafeFileSystemReader | None:
        is_sharded = (self._loaded / INDEX_NAME).exists()
        return SafeFileSystemReader(self._loaded) if is_sharded else None


class SingleDevice(LightningStrategy, SingleDeviceStrategy):
    """One device."""

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, parallel.device)


class Ranks(LightningStrategy, DDPStrategy):
    """Several ranks, whose process group exists already; DDP wraps the module where it is used.

    Lightning would seed every rank alike here, and dropout with it.
    """

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, **(parallel.ddp_arguments or {}))

    def setup_distributed(self) -> None:
        self.set_world_ranks()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks; a mean of integers is not rounded.

        Lightning 2.6 writes the mean into the tensor of integers. With evaluation batches of 18
        samples on one rank and 19 on the other, `self.log(name, value, sync_dist=True)` then
        divides a mean of sums by 18, and not by 18.5.
        """
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
        return super().reduce(tensor, group, reduce_op)

    def configure_ddp(self) -> None:
        if self.parallel.ddp_arguments is not None:
            super().configure_ddp()
        if self.parallel.comm_hook is not None:  # Lightning registers hooks on GPUs only
            cast(DistributedDataParallel, self.model).register_comm_hook(*self.parallel.comm_hook)


class PartitionedRanks(Ranks):
    """The net is where it is to be: Lightning would synchronize ranks' weights, and move them."""

    def setup(self, trainer: pl.Trainer) -> None:
        cast(Accelerator, self.accelerator).setup(trainer)
        self.model = self.precision_plugin.convert_module(cast(nn.Module, self.model))
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        metrics = cast(nn.Module, self.model).get_submodule("metrics")
        for metric in metrics.modules():  # fed alike on all ranks of a data rank
            if isinstance(metric, Metric):
                metric.process_group = self.parallel.data_group

    def model_to_device(self) -> None:
        module: Any = self.model
        net = module.net
        module.net = None  # offloaded shards stay where they are
        module.to(self.root_device)
        module.net = net

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.parallel.without_gradient_sync():
            yield

    def teardown(self) -> None:
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            cast(Accelerator, part).teardown()


def check_optimization(module: pl.LightningModule) -> None:
    """Raises: IncompatibleModelError for manual optimization."""
    if not module.automatic_optimization:
        raise IncompatibleModelError(
            "module._target_", f"automatic_optimization=False: {ONE_OPTIMIZER}"
        )
