"""Lightning strategies that delegate the steps and the checkpoints of a run to gptrain.

`LightningStrategy` is the common part. The three classes below it combine it with a strategy of
Lightning: `LightningSingleDevice`, `LightningMultiRank` and `LightningPartitioned`.

A checkpoint file names the net's tensors as the bare net does, and a tensor of the module outside
`net` with the prefix `module.`. Inside of Lightning's hooks a checkpoint has Lightning's own names
instead, so that callbacks that copy a module (EMA) work as in any Lightning project.
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

INDEX_NAME = ".metadata"  # index file of torch.distributed.checkpoint, in sharded checkpoints only
ONE_OPTIMIZER = (
    "a run counts, schedules and saves the steps of one optimizer in Lightning's loop; "
    "use one optimizer with several parameter groups"
)


@dataclass(frozen=True)
class StrategyInfo:
    """Facts about the run's strategy, and about the net before it was partitioned.

    Attributes:
        name: Name of the strategy, such as `ddp`.
        net_name: Class name of the net.
        n_parameters: Number of parameters of the full net. Tied weights count once.
        n_matrix_weights: Number of weights that are multiplied with every token, see
            `perf.count_matrix_weights`.
    """

    name: str
    net_name: str
    n_parameters: int
    n_matrix_weights: int


class LightningStrategy(Strategy):
    """Mixin for Lightning's strategies that delegates all computation to `self.parallel`.

    A save is either unsharded or sharded. An unsharded save is one file, which rank 0 writes. In a
    sharded save every rank writes its shards of the net and of the optimizer state to files of its
    own; the one file of rank 0 then holds what is left, such as counters and options. Every
    strategy can load both kinds.

    Args:
        parallel: Object that partitions and trains the net.
        arguments: Positional arguments of Lightning's strategy.
        keywords: Keyword arguments of Lightning's strategy.

    Attributes:
        info: Facts about the strategy and the net. `build_strategy` sets them.
        check_finite: Function that is called between the computation of `grad_norm` and the
            optimizer's update. It may raise NonFiniteError.
        grad_norm: Norm of all gradients of the last step before clipping, a scalar tensor that is
            identical on all ranks that take the step together.
        micro_steps: Arguments, keyword arguments and random generator states of training_step, for
            each micro-step of the current step.
        micro_losses: Loss of each micro-step of the current step as Lightning passes it to
            `backward`: detached, and divided by the number of accumulated micro-steps.
        correction: Factor that was applied to the gradients of the last step. It is 1 unless
            training_step passes other targets to the loss than the batch has.
        step_mean: Divisor of the losses of the current step.
        saves_to_store: True while a checkpoint of gptrain is saved, and not a file of Lightning's
            ModelCheckpoint.
        saved: Fingerprints of the newest save's tensors: of rank 0's state file, and of the files
            that only this rank writes. None if no validation will amend this save.
        is_updating: True while the optimizer may have updated some parameters but not all.
        fresh_options: Options of each parameter group as the config gives them, before a checkpoint
            replaced them. They are known after a checkpoint was loaded.
        has_replicas: True if a save contains files of several replicas of the net (DiLoCo).
    """

    info: StrategyInfo
    check_finite: Callable[[pl.Trainer, Optimizer], None] | None = None
    grad_norm: Tensor | None = None
    correction: Tensor | float = 1.0
    saves_to_store = False
    is_updating = False
    saved: tuple[amendment.Fingerprints, amendment.Fingerprints] | None = None
    has_replicas = False
    step_mean: StepMean
    micro_losses: list[Tensor]
    micro_steps: list[tuple[Any, Any, dict[str, Any]]]
    fresh_options: list[dict[str, Any]]
    _gradients_finished = False  # True after the first call of `clip` in a step
    _loaded: Path  # file or folder of the checkpoint that was loaded last

    def __init__(self, parallel: ParallelStrategy, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.parallel = parallel

    @property
    def module(self) -> pl.LightningModule:
        """LightningModule of the run, without a DDP wrapper."""
        return cast(pl.LightningModule, self.lightning_module)

    @property
    def net(self) -> nn.Module:
        """Net of the LightningModule."""
        return self.module.get_submodule("net")

    # Steps

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the optimizer and prepare `self.parallel` for training.

        Raises:
            IncompatibleModelError: If the module's configure_optimizers returns several optimizers.
        """
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
        """Compute the divisor of the losses before the first micro-batch of a step.

        gptrain's data loader reads all micro-batches of a step at once and so knows the number of
        their targets. With a user's own data loader the other micro-batches are assumed to have as
        many targets as the first one.
        """
        trainer = self.module.trainer
        if batch_idx % trainer.accumulate_grad_batches:
            return
        loader = trainer.train_dataloader
        if step_targets := getattr(loader, "step_targets", None):
            n_targets = step_targets.pop(0) or 0
            self.step_mean.compute_divisor(n_targets, getattr(loader, "read_ahead", 1))
        else:
            self.step_mean.compute_divisor(count_batch_targets(batch) or 0, 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step; before the first micro-step, free the old gradients.

        Lightning frees them after the forward pass, which raises the peak memory by the size of the
        gradients: 4 bytes per parameter in fp32.
        """
        trainer = self.module.trainer
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self.micro_losses = []
            self.micro_steps = []
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
        """Keep the micro-step's loss for `step_loss`, then run Lightning's backward pass."""
        self.micro_losses.append(closure_loss.detach())
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def clip(self, optimizer: Optimizer, max_norm: float | None) -> None:
        """Complete the gradients of a step, measure their norm into `grad_norm`, and clip them.

        The first call in a step also synchronizes gradients that `self.parallel` has not
        synchronized yet, and applies `correction`. A module that clips in its own way may call this
        method again. All ranks must call it.

        Args:
            optimizer: Optimizer of the run.
            max_norm: Largest norm after clipping. None only measures the norm.

        Raises:
            NonFiniteError: If `check_finite` finds a loss or a gradient that is NaN or infinite.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        scale = None
        if not self._gradients_finished:
            self.parallel.finish_gradients()
            scale = self.step_mean.correction()
            self.correction = scale
            self._gradients_finished = True
        self.grad_norm = self.parallel.measure_and_clip(parameters, max_norm, scale)
        if self.check_finite is not None:
            self.check_finite(self.module.trainer, optimizer)
        self.is_updating = True  # TrainingMonitor.on_train_batch_end sets it to False

    def step_loss(self) -> Tensor:
        """Return the mean loss of this rank's micro-steps in the last step, after `correction`."""
        n_accumulated = self.module.trainer.accumulate_grad_batches
        # Lightning has divided each loss by n_accumulated.
        return torch.stack(self.micro_losses).mean() * n_accumulated * self.correction

    # Checkpoints

    @property
    def _writes_shards(self) -> bool:
        """True if the current save is sharded, so that `ShardWriter` writes the net's tensors."""
        return self.parallel.is_partitioned and self.saves_to_store

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return name in a checkpoint -> parameter of the module. Tied weights appear once.

        In a pipeline these are the parameters of this rank's stages.
        """
        return states.saved_parameters(self.module, self.parallel.stages)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict, as far as it belongs in the state file of rank 0.

        All ranks must call this method. In a sharded save the result has no tensors of the net. In
        an unsharded save of a partitioned net only rank 0 gets the net's tensors, on the CPU.
        """
        state = super().lightning_module_state_dict()
        if not self.parallel.is_partitioned:
            return state
        extra = _without_net(state)
        if self._writes_shards:
            return extra
        net = states.full_net_state(self.net, self.parallel.stages)
        return {f"{NET}{name}": tensor for name, tensor in net.items()} | extra

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict with parameter names in place of numbers.

        All ranks must call this method. In a sharded save the result has only the options of the
        parameter groups. In an unsharded save only rank 0 gets the tensors, on the CPU.
        """
        parameters = self.saved_parameters()
        stages = self.parallel.stages
        if self._writes_shards:
            groups = states.named_groups(parameters, optimizer, stages)
            return {"state": {}, "param_groups": groups}
        return states.full_optimizer_state(parameters, optimizer, stages)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint. All ranks must call this method; it changes `checkpoint` in place.

        Args:
            checkpoint: State dict that Lightning has collected. Its tensors get their names in a
                checkpoint file.
            filepath: Path for Lightning's own file. Other saves ignore it.
            storage_options: A CheckpointWriter saves a new checkpoint of gptrain. A dict amends the
                newest one after its validation: rank 0 puts the bytes of the small file
                `amendment.NAME` into the dict. None writes Lightning's own file.
        """
        is_amendment = self.saves_to_store and isinstance(storage_options, dict)
        if self._writes_shards and not is_amendment:
            dcp.save(self.own_state(), storage_writer=ShardWriter(storage_options))
        checkpoint["state_dict"] = to_saved_names(checkpoint["state_dict"])
        if storage_options is None:
            super().save_checkpoint(checkpoint, filepath)
            return
        if is_amendment and self.saved is not None:
            if self.is_global_zero:
                storage_options[amendment.NAME] = amendment.amend(checkpoint, self.saved[0])
            return
        if self.is_global_zero:
            with storage_options.open(STATE_NAME) as file:
                torch.save(checkpoint, file)
        self.saved = None
        if not checkpoint["validated"]:
            self.take_fingerprints(checkpoint)

    def own_state(self) -> Any:
        """Return the state that only this rank saves: its shards of the net and the optimizer.

        Returns:
            An empty dict if the net is not partitioned.
        """
        if not self.parallel.is_partitioned:
            return {}
        parameters = self.saved_parameters()
        return states.sharded_state(self.net, parameters, self.optimizers[0], self.parallel.stages)

    def take_fingerprints(self, checkpoint: Any) -> None:
        """Set `saved` to the fingerprints of a save that a validation may amend.

        Args:
            checkpoint: Content of rank 0's state file. Other ranks ignore it.
        """
        of_state_file = amendment.fingerprints(checkpoint) if self.is_global_zero else {}
        self.saved = (of_state_file, amendment.fingerprints(self.own_state()))

    def is_unchanged_since_save(self) -> bool:
        """Return whether the tensors of this rank's own files are those of the newest save.

        The newest checkpoint can be amended, instead of saved again, only if all ranks return True.
        """
        if self.saved is None:
            return False
        return amendment.is_unchanged(self.own_state(), self.saved[1])

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict:
        """Load a checkpoint of gptrain, or a file of Lightning's, on the CPU.

        Tensors in the ranks' own files of a sharded checkpoint are read later, by
        `load_model_state_dict` and `load_optimizer_state_dict`.

        Args:
            checkpoint_path: Folder of a checkpoint, or path of a file.
            weights_only: Ignored. Only tensors and plain values are ever loaded.

        Returns:
            The checkpoint with Lightning's names of the tensors.
        """
        path = Path(checkpoint_path)
        self._loaded = path
        checkpoint = amendment.load_state(path) if path.is_dir() else load_file(path)
        checkpoint["state_dict"] = from_saved_names(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's part of a checkpoint into the module. All ranks must call this method.

        Args:
            checkpoint: Result of `load_checkpoint`.
            strict: Whether names outside `net` must be equal. Names of the net always must.

        Raises:
            ValueError: If the checkpoint does not fit the module.
        """
        reader = self._shard_reader()
        state = checkpoint["state_dict"]
        if reader is None and not self.parallel.is_partitioned:
            super().load_model_state_dict(checkpoint, strict)
            return
        net = {n.removeprefix(NET): t for n, t in state.items() if n.startswith(NET)}
        states.load_net_state(self.net, reader or net, stages=self.parallel.stages)
        missing, unexpected = self.module.load_state_dict(_without_net(state), strict=False)
        unmatched = [name for name in missing if not name.startswith(NET)] + list(unexpected)
        if unmatched and strict:
            raise ValueError(
                f"{self._loaded}: does not fit the module outside its net; missing or unexpected: "
                f"{', '.join(unmatched)}"
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer state, and set `fresh_options`.

        All ranks must call this method. It adapts the states of the learning rate schedules in
        `checkpoint` if the optimizer has another number of parameter groups here.

        Args:
            checkpoint: Result of `load_checkpoint`.
        """
        optimizer = self.optimizers[0]
        state = checkpoint["optimizer_states"][0]
        self.fresh_options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        source = self._shard_reader() or state["state"]
        parameters = self.saved_parameters()
        states.load_optimizer_state(parameters, optimizer, source, state["param_groups"])
        groups = optimizer.param_groups  # a pipeline stage may have fewer groups than were saved
        for schedule in checkpoint["lr_schedulers"]:
            if len(schedule.get("base_lrs", groups)) != len(groups):
                schedule["base_lrs"] = [group["initial_lr"] for group in groups]
                schedule["_last_lr"] = [group["lr"] for group in groups]
                if "lr_lambdas" in schedule:
                    schedule["lr_lambdas"] = []

    def _shard_reader(self) -> SafeFileSystemReader | None:
        """Return a reader of the loaded checkpoint's shards, or None if it is unsharded."""
        is_sharded = (self._loaded / INDEX_NAME).exists()
        return SafeFileSystemReader(self._loaded) if is_sharded else None


class LightningSingleDevice(LightningStrategy, SingleDeviceStrategy):
    """Trains on one device, without a process group."""

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, parallel.device)


class LightningMultiRank(LightningStrategy, DDPStrategy):
    """Trains on several ranks of a process group that exists already.

    The module is wrapped in DistributedDataParallel if `parallel.ddp_arguments` is not None.
    """

    def __init__(self, parallel: ParallelStrategy):
        super().__init__(parallel, **(parallel.ddp_arguments or {}))

    def setup_distributed(self) -> None:
        """Set the ranks in Lightning; do not start a process group and do not seed the generators.

        Lightning would seed all ranks with the same number, so that their dropout masks would be
        identical.
        """
        self.set_world_ranks()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks. The mean of an integer tensor is a float tensor.

        Lightning 2.6 rounds the mean of an integer tensor. With evaluation batches of 18 samples on
        one rank and 19 on another, `self.log(name, value, sync_dist=True)` would then divide the
        sum by 18 instead of 18.5.
        """
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        if is_mean and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            # MPS has no float64.
            tensor = tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
        return super().reduce(tensor, group, reduce_op)

    def configure_ddp(self) -> None:
        """Wrap the module in DistributedDataParallel and register `parallel.comm_hook`, if any.

        Lightning would register a communication hook on GPUs only.
        """
        if self.parallel.ddp_arguments is not None:
            super().configure_ddp()
        if self.parallel.comm_hook is not None:
            cast(DistributedDataParallel, self.model).register_comm_hook(*self.parallel.comm_hook)


class LightningPartitioned(LightningMultiRank):
    """Trains a net whose parts are already on their ranks and devices.

    Lightning's own steps that would broadcast the weights of rank 0, move the net to the device and
    wrap the module are skipped.
    """

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the accelerator, the precision and, in a fit, the optimizer.

        Metrics of the module are synchronized among the data ranks only, because all ranks of one
        data rank update them with the same values.
        """
        cast(Accelerator, self.accelerator).setup(trainer)
        self.model = self.precision_plugin.convert_module(cast(nn.Module, self.model))
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        metrics = cast(nn.Module, self.model).get_submodule("metrics")
        for metric in metrics.modules():
            if isinstance(metric, Metric):
                metric.process_group = self.parallel.data_group

    def model_to_device(self) -> None:
        """Move everything but the net to the device; CPU-offloaded shards of the net stay."""
        module: Any = self.model
        net = module.net
        module.net = None
        module.to(self.root_device)
        module.net = net

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without communication inside the block."""
        with self.parallel.without_gradient_sync():
            yield

    def teardown(self) -> None:
        """Tear down Lightning's parts of the run, but do not move the net to the CPU."""
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            cast(Accelerator, part).teardown()


def check_optimization(module: pl.LightningModule) -> None:
    """Check that Lightning's automatic optimization runs the module.

    Raises:
        IncompatibleModelError: If the module has automatic_optimization=False.
    """
    if not module.automatic_optimization:
        raise IncompatibleModelError(
            "module._target_", f"automatic_optimization=False: {ONE_OPTIMIZER}"
        )


def _without_net(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a module's state dict that do not belong to its net."""
    return {name: value for name, value in state.items() if not name.startswith(NET)}
