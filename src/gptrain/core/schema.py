"""Types of all keys of a run. The defaults are in the yaml files of `conf/`.

`RunConfig` is the whole configuration, with one section per group. A class that ships with gptrain
has a section type of its own, which is found by its `_target_`. For any other class only the keys
that gptrain reads are typed. All other keys are arguments of that class. To add a key, add its line
to a yaml file in `conf/` and its line here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator
from typing_extensions import Self

from gptrain.core import value_types as types
from gptrain.core.data_schema import DATA, DataConfig, find_data_kind
from gptrain.core.lengths import BatchPlan, plan_batch
from gptrain.core.strategies import STRATEGIES, DDPOptions, StrategyOptions
from gptrain.core.value_types import Chosen, Count, KeepsResult, Section, TargetConfig, between

# Groups with a `_target_`


class ModelConfig(TargetConfig):
    """Keys that every model group has. The other keys are arguments of the net's class.

    Attributes:
        compile: Parts of the net that torch.compile compiles: none, each block, or the whole model.
        activation_checkpointing: Activations that the backward pass recomputes: none, all but the
            outputs of matrix multiplications and attention (`selective`), or all.
        vocab_multiple: Number to a multiple of which the size of `vocab_size: auto` is rounded up.
    """

    OWN_KEYS = frozenset({"compile", "activation_checkpointing", "vocab_multiple"})

    compile: Annotated[Literal["none", "blocks", "model"], KeepsResult]
    activation_checkpointing: Annotated[Literal["none", "selective", "full"], KeepsResult]
    vocab_multiple: Annotated[Count, KeepsResult] = 1  # the resulting vocab_size is compared


class DecoderConfig(ModelConfig, extra="forbid"):
    """Sizes that all decoders of `gptrain.models` have.

    Attributes:
        vocab_size: Number of tokens of the vocabulary.
        d_model: Width of the residual stream.
        n_heads: Number of query heads.
        n_layers: Number of blocks.
        max_seq_len: Largest number of positions of a sequence.
    """

    vocab_size: Count
    d_model: Count
    n_heads: Count
    n_layers: Count
    max_seq_len: Count


class SimpleGPTConfig(DecoderConfig):
    """Keys of `gptrain.models.SimpleGPT`, a GPT-2.

    Attributes:
        dropout: Probability of dropout in training.
        activation: Activation function of the feed-forward layers: the exact GELU or its tanh form.
    """

    dropout: types.BelowOne
    activation: Literal["gelu", "gelu_tanh"]


class LlamaConfig(DecoderConfig):
    """Keys of `gptrain.models.Llama`.

    Attributes:
        n_kv_heads: Number of key and value heads. It divides `n_heads`.
        d_ff: Width of the feed-forward layers.
        rope_base: Base of the wavelengths of rotary position embeddings.
        rope_scaling: Factor by which slow rotations are slowed down, as in Llama 3.1. 1 for none.
        norm_eps: Epsilon of RMSNorm.
        qk_norm: Whether queries and keys are normalized in each head.
        tie_head: Whether the head uses the weight of the embedding.
        d_head: Width of a head. None for `d_model / n_heads`, also in older run folders.
    """

    n_kv_heads: Count
    d_ff: Count
    rope_base: types.Positive
    rope_scaling: types.AtLeastOne
    norm_eps: types.Positive
    qk_norm: bool
    tie_head: bool
    d_head: Annotated[int, between(2)] | None = None


class HuggingFaceConfig(ModelConfig, extra="forbid"):
    """Keys of `gptrain.models.HuggingFace`, a causal language model of transformers.

    Attributes:
        vocab_size: Number of tokens, which must equal that in the model's config.
        config: Keys of the model's config. They override those in the config.json of `path`.
        path: Folder with the config.json of a model, or None if `config` has all keys. Weights are
            loaded from it by `init_from`, not by this key.
    """

    vocab_size: Count
    config: dict[str, Any] | None
    path: types.LocalPath | None


class LossConfig(Section):
    """Options of the training loss, which become a `gptrain.loss.LossOptions`.

    Attributes:
        label_smoothing: Probability that is moved from the target to all tokens in equal parts.
        z_loss: Weight of log(Z)^2 in the loss, where Z is the normalizer of the softmax.
    """

    label_smoothing: types.BelowOne
    z_loss: types.NonNegative


class ModuleConfig(TargetConfig):
    """Keys of any module group. The `_target_` is a LightningModule.

    Attributes:
        loss: Options of the loss, which only a `gptrain.lit.LanguageModel` reads.
        metrics: Nodes of torchmetrics by name, which only a `gptrain.lit.LanguageModel` reads.
    """

    OWN_KEYS = frozenset({"loss", "metrics"})

    loss: Any = None
    metrics: Any = None

    @property
    def loss_options(self) -> dict[str, float]:
        """Keyword arguments of `gptrain.loss.LossOptions`, empty if none is given."""
        return self.plain().get("loss") or {}

    @property
    def metric_nodes(self) -> dict[str, dict[str, Any]]:
        """Node with the `_target_` of each metric, by the metric's name. Empty without metrics."""
        return self.plain().get("metrics") or {}


class LanguageModelConfig(ModuleConfig, extra="forbid"):
    """Keys of `gptrain.lit.LanguageModel`.

    Attributes:
        loss: Options of the training loss.
        metrics: Node with the `_target_` of a torchmetrics class, by the name under which it is
            logged.
    """

    loss: LossConfig
    metrics: dict[str, TargetConfig]


class OptimizerConfig(TargetConfig):
    """Keys of any optimizer group.

    Attributes:
        lr: Peak learning rate. None leaves the default of the class.
        weight_decay: Weight decay. None leaves the default of the class.
        lr_scaling: How the learning rate grows with the global batch size: not at all, in
            proportion to it, or to its square root.
        reference_batch_size: Global batch size at which `lr` is used as given.
    """

    OWN_KEYS = frozenset({"lr_scaling", "reference_batch_size"})

    lr: types.PositiveNumber | None
    weight_decay: types.NonNegative | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    reference_batch_size: Count


class AdamWConfig(OptimizerConfig):
    """Keys of `torch.optim.AdamW`.

    Attributes:
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Term added to the denominator of the update.
        fused: Whether one kernel updates all parameters. None leaves the choice to torch.
    """

    betas: types.Betas
    eps: types.Positive
    fused: bool | None = None


class MuonConfig(AdamWConfig):
    """Keys of `gptrain.optim.Muon`: Muon for hidden matrices, AdamW for all other parameters.

    Attributes:
        momentum: Momentum of the hidden matrices.
        embedding_lr: Learning rate of embeddings, also of a head with a tied weight. None for `lr`.
        head_lr: Learning rate of a head whose weight is not tied. None for `lr`.
        vector_lr: Learning rate of norms and biases. None for `lr`.
    """

    momentum: types.BelowOne
    embedding_lr: types.PositiveNumber | None = None
    head_lr: types.PositiveNumber | None = None
    vector_lr: types.PositiveNumber | None = None


class PhaseLength(NamedTuple):
    """Length of a phase of the schedule, such as the warm-up, as the config gives it.

    At least one of the two units is None. If both are, the length has a default.

    Attributes:
        steps: Optimizer steps, or a fraction of the run below 1.
        tokens: Number of tokens, over all ranks.
    """

    steps: float | None
    tokens: float | None


class SchedulerConfig(TargetConfig):
    """Keys of any scheduler group. A schedule gets the keys that are in its signature.

    A phase has a length in steps or in tokens, not both.

    Attributes:
        warmup_steps: Optimizer steps of the warm-up, or a fraction of the run below 1. None stands
            for 100 steps, but at most a tenth of the run, if `warmup_tokens` is None, too.
        warmup_tokens: Length of the warm-up in tokens, over all ranks.
        total_steps: Length of the schedule in steps. None for the length of the run.
        total_tokens: Length of the schedule in tokens, over all ranks.
        start_factor: First learning rate, as a fraction of the peak.
        min_factor: Last learning rate, as a fraction of the peak.
    """

    warmup_steps: types.Warmup | None
    warmup_tokens: types.TokenCount | None
    total_steps: Count | None
    total_tokens: types.TokenCount | None
    start_factor: types.Fraction
    min_factor: types.Fraction

    def phase(self, name: str) -> PhaseLength:
        """Return the configured length of a phase.

        Args:
            name: `warmup`, `decay` or `total`. A phase that the group does not have gives two
                Nones.
        """
        keys = self.arguments
        return PhaseLength(keys.get(f"{name}_steps"), keys.get(f"{name}_tokens"))


class WarmupConfig(SchedulerConfig, extra="forbid"):
    """Keys of `gptrain.optim.constant` and `gptrain.optim.warmup_constant`."""


class DecayConfig(WarmupConfig):
    """Keys of a schedule that decays until the last step of the run, such as `warmup_cosine`.

    A run whose length in steps is not known cannot have such a schedule, unless `total_steps` or
    `total_tokens` is given.
    """


class StableDecayConfig(DecayConfig):
    """Keys of `gptrain.optim.warmup_stable_decay`, which decays at the end of a constant phase.

    Attributes:
        decay_steps: Optimizer steps of the decay, or a fraction of the run below 1. None stands for
            a fifth of the run, if `decay_tokens` is None, too.
        decay_tokens: Length of the decay in tokens, over all ranks.
    """

    decay_steps: types.Warmup | None
    decay_tokens: types.TokenCount | None


class SampleTextConfig(TargetConfig, extra="forbid"):
    """Keys of `gptrain.lit.callbacks.SampleText`, which prints generated text at the end of a run.

    Attributes:
        prompt: Text to continue.
        n_tokens: Number of tokens to generate.
    """

    prompt: types.Name
    n_tokens: Count


class TrainerConfig(TargetConfig):
    """Arguments of any Trainer that gptrain reads. The names are Lightning's.

    The keys below differ from Lightning's in their meaning, their unit or their default.

    Attributes:
        num_nodes: Number of nodes. `auto` stands for the nodes on which the launcher started ranks.
        precision: Precision by Lightning's name. `auto` stands for that which the devices compute
            natively.
        max_epochs: Maximum number of epochs. -1 for no limit. None stands for 3 if nothing else
            limits the run.
        limit_train_batches: Micro-batches of an epoch for each rank, or a fraction of the epoch.
        limit_val_batches: Batches of `data.batch_size` samples that a validation reads, counted as
            one process reads the set, or their fraction. All ranks together read these samples.
            For a user's LightningDataModule, Lightning counts the batches of each rank.
        limit_test_batches: The same for a test.
        val_check_interval: Optimizer steps between two validations, or a fraction of an epoch.
            Lightning counts micro-batches instead.
        gradient_clip_val: Threshold of gradient clipping in an optimizer step. 0 or None for no
            clipping.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"]
    devices: types.Devices
    num_nodes: Literal["auto"] | Count
    precision: types.PrecisionName
    max_epochs: Literal[-1] | Count | None
    max_steps: Literal[-1] | Annotated[int, between(1, 2**40)]
    min_steps: Annotated[int, between(0)] | None
    max_time: types.Duration
    accumulate_grad_batches: Count
    gradient_clip_val: types.NonNegative | None
    fast_dev_run: types.Batches
    overfit_batches: Annotated[int, between(0)] | types.Fraction
    limit_train_batches: types.Interval | None
    limit_val_batches: types.Limit
    limit_test_batches: types.Limit
    val_check_interval: types.Interval
    check_val_every_n_epoch: Count | None
    num_sanity_val_steps: Annotated[int, between(-1)] | None
    log_every_n_steps: Count
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    detect_anomaly: bool


class LightningTrainerConfig(TrainerConfig, extra="forbid"):
    """Keys of `lightning.pytorch.Trainer`.

    The keys below are optional: no yaml file has them, and an override needs a `+`, such as
    `+trainer.sync_batchnorm=true`. Arguments of the Trainer that another group sets, such as
    `callbacks`, are unknown keys here.
    """

    min_epochs: Annotated[int, between(0)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    limit_predict_batches: types.Limit = None
    reload_dataloaders_every_n_epochs: Annotated[int, between(0)] = 0
    sync_batchnorm: bool = False


# Groups without a `_target_`. The types of the strategy group are in gptrain.core.strategies.


class CheckpointConfig(Section):
    """Keys of the checkpoint group: when checkpoints are saved, how many are kept, and copies.

    Attributes:
        name: Name of the choice, such as `every_n_steps`. With `none` nothing is saved.
        every_n_steps: Optimizer steps between two checkpoints, in addition to those at validations,
            or None.
        every_minutes: Minutes without a checkpoint after which one is saved, by the clock of
            rank 0, or None.
        keep: Number of newest checkpoints that are kept, at least 2.
        monitor: Name of a logged value. The checkpoint with its best value is kept too.
        mode: Whether a small or a large value of `monitor` is better.
        background: Whether a thread writes the files during the next steps.
        mirror: Folder or fsspec URL to which each checkpoint is copied, or None.
    """

    name: Literal["default", "every_n_steps", "none"]
    every_n_steps: Count | None
    every_minutes: types.PositiveNumber | None
    keep: Annotated[int, between(2)]  # if the newest is damaged, a run resumes from another
    monitor: types.Name
    mode: Literal["min", "max"]
    background: bool
    mirror: types.Name | None


class LauncherConfig(Section):
    """Keys of the launcher group: how local ranks are restarted and watched.

    Attributes:
        max_restarts: Number of times that failed ranks are started again.
        timeout_s: Seconds without progress after which a rank counts as hung. None stands for
            `strategy.timeout_s`.
    """

    max_restarts: Annotated[int, between(0)]
    timeout_s: types.Positive | None


class SpikeConfig(Section):
    """Keys of the spike group: definition of the spikes to which `on_spike` reacts.

    Attributes:
        sigma: A step is a spike if its loss or its gradient norm is more than this number of
            standard deviations above the mean of the window.
        window: Number of earlier steps over which mean and standard deviation are computed.
    """

    sigma: types.Positive
    window: Annotated[int, between(2, 100_000)]


# Section type of each class whose keys are all typed, by `_target_`.
SHIPPED: dict[str, type[TargetConfig]] = {
    "gptrain.models.SimpleGPT": SimpleGPTConfig,
    "gptrain.models.Llama": LlamaConfig,
    "gptrain.models.HuggingFace": HuggingFaceConfig,
    "gptrain.lit.LanguageModel": LanguageModelConfig,
    "torch.optim.AdamW": AdamWConfig,
    "gptrain.optim.Muon": MuonConfig,
    "gptrain.optim.constant": WarmupConfig,
    "gptrain.optim.warmup_constant": WarmupConfig,
    "gptrain.optim.warmup_cosine": DecayConfig,
    "gptrain.optim.warmup_linear": DecayConfig,
    "gptrain.optim.warmup_stable_decay": StableDecayConfig,
    "gptrain.lit.callbacks.SampleText": SampleTextConfig,
    "lightning.pytorch.Trainer": LightningTrainerConfig,
}


def by_target(base: type[TargetConfig]) -> Chosen:
    """Return the mark of a group whose `_target_` may be one of the classes in SHIPPED."""
    kinds = {target: kind for target, kind in SHIPPED.items() if issubclass(kind, base)}
    return Chosen(kinds, lambda node: node.get("_target_"))


# Type of the options by `strategy.name`. `auto` has those of `ddp`.
KINDS = {"auto": DDPOptions, **STRATEGIES}


class RunConfig(Section):
    """Configuration of a run, after validation. A command with additional keys has a subclass.

    Attributes:
        runs_here: False for a command that plans for another machine, or only prints. The checks
            then skip this machine, its folders and its files, and no run folder is created.
        expands_run: False for a command that reads the folder of `from_run` by itself. Otherwise
            the overrides of that run are put in front of those on the command line.
        name: Name of the run, which is part of the default `run_dir`.
        task: Whether the run trains (`fit`) or evaluates (`validate`, `test`).
        seed: Seed of weights, data order and dropout.
        max_tokens: Number of tokens after which the run ends, over all ranks, or None.
        on_nonfinite: Reaction to a loss or a gradient that is NaN or infinite.
        on_spike: Reaction to a spike of the loss or the gradient norm.
        spike: Definition of a spike.
        max_skips: Number of steps in a row after which the run ends, if `on_nonfinite`, `on_spike`
            or the loss scaler of 16-mixed skips all of them.
        objective: Logged name of the metric that a sweep optimizes.
        output_dir: Folder of all run folders.
        run_dir: Folder into which this run writes.
        ckpt_path: Checkpoint of an exact resume or an evaluation: a path, `last` or `best`.
        allow_changes: Keys and groups that may differ from those of the resumed checkpoint.
        init_from: Source of the initial weights of a new run: a run, a checkpoint or a folder.
        init_strict: Whether all tensors of `init_from` and of the net must match.
        from_run: Folder of a run whose overrides come before those that were typed.
        trust: Whether the config of `from_run` is used although another person started that run.
        debug: Whether tracebacks are printed.
        model: Net.
        module: LightningModule around the net.
        data: Datasets and batch sizes.
        optimizer: Optimizer and peak learning rate.
        scheduler: Learning-rate schedule.
        strategy: Parallelism strategy and its options.
        trainer: Lightning's Trainer.
        callbacks: Lightning callbacks by name. None removes a callback.
        checkpoint: When checkpoints are saved and how many are kept.
        logger: Lightning loggers by name.
        profiler: Lightning's profiler, or None.
        launcher: Restarts and timeouts of the local ranks.
    """

    runs_here: ClassVar[bool] = True
    expands_run: ClassVar[bool] = True

    name: types.LocalPath
    task: Literal["fit", "validate", "test"]
    seed: Annotated[int, between(0, types.SEED_MAX)]
    max_tokens: types.TokenCount | None
    on_nonfinite: Literal["stop", "skip"]
    on_spike: Literal["none", "warn", "skip"]
    spike: SpikeConfig
    max_skips: Count
    objective: types.Name
    output_dir: types.LocalPath
    run_dir: types.LocalPath
    ckpt_path: types.LocalPath | None
    allow_changes: list[str]
    init_from: types.LocalPath | None
    init_strict: bool
    from_run: types.LocalPath | None
    trust: bool
    debug: bool
    model: Annotated[ModelConfig, by_target(ModelConfig)]
    module: Annotated[ModuleConfig, by_target(ModuleConfig)]
    data: Annotated[DataConfig, Chosen(DATA, find_data_kind)]
    optimizer: Annotated[OptimizerConfig, by_target(OptimizerConfig)]
    scheduler: Annotated[SchedulerConfig, by_target(SchedulerConfig)]
    strategy: Annotated[StrategyOptions, Chosen(KINDS, lambda node: node.get("name"))]
    trainer: Annotated[TrainerConfig, by_target(TrainerConfig)]
    callbacks: dict[str, Annotated[TargetConfig, by_target(TargetConfig)] | None]
    checkpoint: CheckpointConfig
    logger: dict[str, TargetConfig]
    profiler: Annotated[TargetConfig | None, BeforeValidator(lambda node: node or None)]
    launcher: LauncherConfig

    def batch_plan(self, data_parallel_size: int) -> BatchPlan:
        """Return the numbers whose product is the global batch size of the run.

        Args:
            data_parallel_size: Number of ranks that train on different samples.

        Raises:
            ValueError: If `data.global_batch_size` cannot be divided by the samples of a
                micro-step, or if gradient accumulation is set in addition to it.
        """
        data, accumulate = self.data, self.trainer.accumulate_grad_batches
        return plan_batch(data.batch_size, data.global_batch_size, accumulate, data_parallel_size)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy in which some keys have other values. The values are not validated.

        Other keys keep their values, also those whose yaml line refers to a changed key. The
        original config does not change.

        Args:
            values: New value of each key. A key has at most one dot, such as `run_dir` or
                `data.batch_size`.
        """
        copy = self.model_copy()
        for key, value in values.items():
            group, _, leaf = key.rpartition(".")
            if group:
                key, value = group, getattr(copy, group).model_copy(update={leaf: value})
            copy = copy.model_copy(update={key: value})
        return copy

    def value_of(self, key: str) -> Any:
        """Return the value of a dotted key for an error message, or None for an unknown key."""
        node: Any = self.plain()
        for name in key.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node
