"""Types of all keys of a run. The yaml files of `conf/` have their meaning and their defaults.

`RunConfig` is the whole configuration, with one section per group. A class that ships with gptrain
has a section type of its own, which is found by its `_target_`. For any other class only the keys
that gptrain reads are typed. All other keys are arguments of that class. To add a key, add its line
to a yaml file in `conf/` and its line here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import Self

from gptrain.core import value_types as types
from gptrain.core.small_files import flatten
from gptrain.core.strategies import STRATEGIES, DDPOptions, StrategyOptions
from gptrain.core.value_types import Count, KeepsResult, OpenSection, Section, TargetConfig, between

# Groups with a `_target_`


class ModelConfig(TargetConfig):
    """Keys of any model group that gptrain reads. The others are arguments of the net's class."""

    OWN_KEYS = frozenset({"compile", "activation_checkpointing", "vocab_multiple"})

    compile: Annotated[Literal["none", "blocks", "model"], KeepsResult]
    activation_checkpointing: Annotated[Literal["none", "selective", "full"], KeepsResult]
    vocab_multiple: Annotated[Count, KeepsResult] = 1  # the resulting vocab_size is compared


class DecoderConfig(ModelConfig, extra="forbid"):
    """Sizes that all decoders of `gptrain.models` have."""

    vocab_size: Count
    d_model: Count
    n_heads: Count
    n_layers: Count
    max_seq_len: Count


class SimpleGPTConfig(DecoderConfig):
    """Keys of `gptrain.models.SimpleGPT`, a GPT-2."""

    dropout: types.BelowOne
    activation: Literal["gelu", "gelu_tanh"]


class LlamaConfig(DecoderConfig):
    """Keys of `gptrain.models.Llama`."""

    n_kv_heads: Count
    d_ff: Count
    rope_base: types.Positive
    rope_scaling: Annotated[float, Field(ge=1)]
    norm_eps: types.Positive
    qk_norm: bool
    tie_head: bool
    d_head: Annotated[Count, Field(multiple_of=2)] | None = None


class HuggingFaceConfig(ModelConfig, extra="forbid"):
    """Keys of `gptrain.models.HuggingFace`, a causal language model of transformers."""

    vocab_size: Count
    config: dict[str, Any] | None
    path: types.LocalPath | None


class LossConfig(Section):
    """Options of the training loss, which become a `gptrain.loss.LossOptions`."""

    label_smoothing: types.BelowOne
    z_loss: types.NonNegative


class ModuleConfig(TargetConfig):
    """Keys of any module group. The `_target_` is a LightningModule.

    `loss` and `metrics` have an effect for a LanguageModel only. The other keys are arguments.
    """

    OWN_KEYS = frozenset({"loss", "metrics"})

    loss: Any = None
    metrics: Any = None


class LanguageModelConfig(ModuleConfig, extra="forbid"):
    """Keys of `gptrain.lit.LanguageModel`."""

    loss: LossConfig
    metrics: dict[str, TargetConfig]


class OptimizerConfig(TargetConfig):
    """Keys that every optimizer group has. Further keys are arguments of the optimizer's class."""

    OWN_KEYS = frozenset({"lr_scaling", "reference_batch_size"})

    lr: types.Positive | None
    weight_decay: types.NonNegative | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    reference_batch_size: Count


class AdamWConfig(OptimizerConfig):
    """Keys of `torch.optim.AdamW`. Further keys are arguments of this class, too."""

    betas: Annotated[list[types.BelowOne], Field(min_length=2, max_length=2)]
    eps: types.Positive
    fused: bool | None = None


class MuonConfig(AdamWConfig):
    """Keys of `gptrain.optim.Muon`: Muon for hidden matrices, AdamW for all other parameters."""

    momentum: types.BelowOne
    embedding_lr: types.Positive | None = None
    head_lr: types.Positive | None = None
    vector_lr: types.Positive | None = None


class SchedulerConfig(TargetConfig):
    """Keys of any scheduler group. A schedule gets those of them that are in its signature.

    A phase has a length in steps or in tokens, not both.
    """

    warmup_steps: types.Share | None
    warmup_tokens: types.TokenCount | None
    total_steps: Count | None
    total_tokens: types.TokenCount | None
    start_factor: types.Fraction
    min_factor: types.Fraction

    def phase(self, name: str) -> tuple[float | None, float | None]:
        """Return the values of `<name>_steps` and `<name>_tokens`. None for a null or missing key.

        `name` is "warmup", "decay" or "total". A number of steps below 1 is a fraction of the total
        length. `phase_steps` computes the length in steps.
        """
        keys = self.arguments
        return keys.get(f"{name}_steps"), keys.get(f"{name}_tokens")


class WarmupConfig(SchedulerConfig, extra="forbid"):
    """Keys of `gptrain.optim.constant` and `gptrain.optim.warmup_constant`."""


class DecayConfig(WarmupConfig):
    """Keys of a schedule that decays until the last step of the run, such as `warmup_cosine`.

    A run whose length in steps is not known cannot have such a schedule, unless `total_steps` or
    `total_tokens` is given.
    """


class StableDecayConfig(DecayConfig):
    """Keys of `gptrain.optim.warmup_stable_decay`, which decays at the end of a constant phase."""

    decay_steps: types.Share | None
    decay_tokens: types.TokenCount | None


class SampleTextConfig(TargetConfig, extra="forbid"):
    """Keys of `gptrain.lit.callbacks.SampleText`, which prints text that the net continues."""

    prompt: types.Name
    n_tokens: Count


class TrainerConfig(TargetConfig):
    """Arguments of any Trainer that gptrain knows. The names are Lightning's.

    Some of them have another meaning, unit or default than Lightning's. See conf/trainer.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"]
    devices: types.Devices
    num_nodes: Literal["auto"] | Count
    precision: types.PrecisionName
    max_epochs: Literal[-1] | Count | None
    max_steps: Literal[-1] | Annotated[int, between(1, 2**40)]
    min_steps: Annotated[int, between(0)] | None
    max_time: types.Duration | None
    accumulate_grad_batches: Count
    gradient_clip_val: types.NonNegative | None
    fast_dev_run: bool | Annotated[int, between(0)]
    overfit_batches: types.Share
    limit_train_batches: types.Interval | None
    limit_val_batches: types.Share | None
    limit_test_batches: types.Share | None
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
    """Keys of `lightning.pytorch.Trainer`. Other keys are refused.

    No yaml file has the keys below, so that `+` is needed to set them.
    """

    min_epochs: Annotated[int, between(0)] | None = None
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    limit_predict_batches: types.Share | None = None
    reload_dataloaders_every_n_epochs: Annotated[int, between(0)] = 0
    sync_batchnorm: bool = False


# Groups without a `_target_`. The types of the strategy group are in gptrain.core.strategies.


class CheckpointConfig(Section):
    """Keys of the checkpoint group: when checkpoints are saved, and which are kept and copied."""

    name: Literal["default", "every_n_steps", "none"]
    every_n_steps: Count | None
    every_minutes: types.Positive | None
    keep: Annotated[int, between(2)]  # if the newest is damaged, a run resumes from another
    monitor: types.Name
    mode: Literal["min", "max"]
    background: bool
    mirror: types.Name | None


class LauncherConfig(Section):
    """Keys of the launcher group: how local ranks are restarted and watched."""

    max_restarts: Annotated[int, between(0)]
    timeout_s: types.Positive | None


class SpikeConfig(Section):
    """Keys of the spike group: definition of the spikes to which `on_spike` reacts."""

    sigma: types.Positive
    window: Annotated[int, between(2, 100_000)]


# Data


def _find_data_kind(node: dict[str, Any]) -> object:
    """Return the key of _DATA for a data group, or any other value for a group of other data."""
    if "_target_" in node:
        return "LightningDataModule"
    train = node.get("train")
    return train.get("_target_") if isinstance(train, dict) else None


class DataConfig(OpenSection):
    """Keys that every data group has. The other keys depend on the group."""

    # The resulting global batch size is compared on a resume.
    batch_size: Annotated[Count, KeepsResult]
    global_batch_size: Annotated[Count | None, KeepsResult]
    num_workers: Annotated[int, between(0, types.WORKERS_MAX), KeepsResult]
    train: TargetConfig
    val: TargetConfig
    test: TargetConfig | None = None

    @property
    def sample_tokens(self) -> int | None:
        """Positions of a sample by the config. None if the group has no integer `seq_len`."""
        length = self.plain().get("seq_len")
        return length if type(length) is int else None

    @property
    def masks_documents(self) -> bool:
        """True if a key `documents` of the group is "masked": attention stays within one."""
        facts = flatten(self.plain())  # a mixture has keys such as parts.a.documents
        return any(facts[key] == "masked" for key in facts if key.split(".")[-1] == "documents")


class DataModuleConfig(DataConfig):
    """Data group whose `_target_` is a LightningDataModule. Its other keys are the arguments.

    The fields of DataConfig are arguments like any other key, and none of them is required.
    """

    target: str = Field(alias="_target_")
    batch_size: Annotated[Count, KeepsResult] = 1
    global_batch_size: Annotated[Count | None, KeepsResult] = None
    num_workers: Annotated[int, between(0, types.WORKERS_MAX), KeepsResult] = 0
    train: Any = None
    val: Any = None
    test: Any = None


class WeightedDataConfig(DataConfig):
    """Shipped data group. As a part of a mixture it has the share `weight`."""

    weight: types.Positive = 1


class DummyTextConfig(WeightedDataConfig):
    """Keys of `data=dummy_text`, whose samples are random tokens."""

    num_samples: Count
    seq_len: Annotated[int, between(2)]

    @property
    def sample_tokens(self) -> int | None:
        """Positions of a sample: the last of `seq_len` tokens is a target only."""
        return self.seq_len - 1


class TextConfig(WeightedDataConfig):
    """Keys of `data=text`, which tokenizes text files and files of records."""

    seq_len: Count
    path: types.LocalPaths | None
    pattern: types.Name
    format: Literal["text", "jsonl", "json", "parquet", "csv"] | None
    text_key: types.Name | None
    tokenizer: types.LocalPath
    end_of_document: bool | None
    documents: Literal["packed", "masked"]
    val_fraction: Annotated[float, Field(gt=0, lt=1)]


class TokensConfig(WeightedDataConfig):
    """Keys of `data=tokens`, which reads files of token ids."""

    seq_len: Count
    train_path: types.LocalPaths
    val_path: types.LocalPaths
    dtype: Literal["uint16", "uint32", "int64"]


class PartConfig(OpenSection):
    """Part of a mixture with datasets of the user. Other parts have the type of their group."""

    weight: types.Positive = 1
    train: TargetConfig
    val: TargetConfig


# Type of a data group that ships, by the `_target_` of its `train`, and of a LightningDataModule.
_DATA: dict[str, type[DataConfig]] = {
    "gptrain.data.DummyTextDataset": DummyTextConfig,
    "gptrain.data.TextDataset": TextConfig,
    "gptrain.data.TokenDataset": TokensConfig,
}


class MixtureConfig(DataConfig):
    """Keys of `data=mixture`, which draws samples from several datasets."""

    seq_len: Count
    parts: dict[str, Annotated[PartConfig, types.chosen(dict(_DATA), _find_data_kind)]]


_DATA |= {"gptrain.data.Mixture": MixtureConfig, "LightningDataModule": DataModuleConfig}


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


def _by_target(base: type[TargetConfig]) -> Any:
    """Return the mark of a group whose `_target_` may be in SHIPPED, for use in Annotated."""
    kinds = {target: kind for target, kind in SHIPPED.items() if issubclass(kind, base)}
    return types.chosen(kinds, lambda node: node.get("_target_"))


# Type of the options by `strategy.name`. `auto` has those of `ddp`.
_KINDS = {"auto": DDPOptions, **STRATEGIES}


class RunConfig(Section):
    """Configuration of a run, after validation. A command with additional keys has a subclass.

    The comments in `gptrain/conf` explain the keys. An object is not changed after validation:
    `changed` makes a copy.

    Attributes:
        expands_run: False for a command that reads the folder of `from_run` by itself. Otherwise
            the overrides of that run are put in front of those on the command line.
    """

    expands_run: ClassVar[bool] = True

    name: types.LocalPath
    task: Literal["fit", "validate", "test"]
    seed: Annotated[int, between(0, 2**32 - 1)]  # a larger one numpy refuses
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
    model: Annotated[ModelConfig, _by_target(ModelConfig)]
    module: Annotated[ModuleConfig, _by_target(ModuleConfig)]
    data: Annotated[DataConfig, types.chosen(_DATA, _find_data_kind)]
    optimizer: Annotated[OptimizerConfig, _by_target(OptimizerConfig)]
    scheduler: Annotated[SchedulerConfig, _by_target(SchedulerConfig)]
    strategy: Annotated[StrategyOptions, types.chosen(_KINDS, lambda node: node.get("name"))]
    trainer: Annotated[TrainerConfig, _by_target(TrainerConfig)]
    callbacks: dict[str, Annotated[TargetConfig, _by_target(TargetConfig)] | None]
    checkpoint: CheckpointConfig
    logger: dict[str, TargetConfig]
    profiler: Annotated[TargetConfig | None, BeforeValidator(lambda node: node or None)]
    launcher: LauncherConfig

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with other values of some keys, such as {"data.batch_size": 8}.

        The values are not validated. All other keys keep their values, also those whose yaml line
        refers to a changed key. A key has at most one dot, and the group in front of it is a
        section, such as `data`.
        """
        copy = self.model_copy(deep=True)
        for key, value in values.items():
            group, _, leaf = key.rpartition(".")
            setattr(getattr(copy, group) if group else copy, leaf, value)
        return copy

    def value_of(self, key: str) -> Any:
        """Return the value of a dotted key, or None if it is a group or not in the config.

        A default of the schema that no yaml file has counts as not given.
        """
        return flatten(self.plain()).get(key)
