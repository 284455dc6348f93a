"""Types of the `data` group: all keys of the groups that ship, and the keys that others need."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gptrain.core.value_types import (
    WORKERS_MAX,
    Count,
    LocalPath,
    LocalPaths,
    Name,
    OpenSection,
    Positive,
    TargetConfig,
    between,
)

DUMMY = "gptrain.data.DummyTextDataset"


class DataConfig(OpenSection):
    """Keys of any data group. Its yaml may have more keys, to which its datasets refer."""

    batch_size: Count
    global_batch_size: Count | None
    num_workers: Annotated[int, between(0, WORKERS_MAX)]
    train: TargetConfig
    val: TargetConfig
    test: TargetConfig | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Keys that only some data groups have, such as `seq_len` and `tokenizer`."""
        return {k: v for k, v in self.plain().items() if k not in DataConfig.model_fields}

    @property
    def sample_tokens(self) -> int | None:
        """Number of positions of a sample, or None if the group does not say it."""
        length = self.extra.get("seq_len")
        return length if type(length) is int else None


class DummyTextConfig(DataConfig):
    """Keys of `data=dummy_text`."""

    num_samples: Count
    seq_len: Annotated[int, between(2)]

    @property
    def sample_tokens(self) -> int | None:
        """The last token of a dummy sample is a target only."""
        return self.seq_len - 1 if self.seq_len else None


class TextConfig(DataConfig):
    """Keys of `data=text`."""

    seq_len: Count
    path: LocalPaths | None
    pattern: Name
    format: Literal["text", "jsonl", "json", "parquet"] | None
    text_key: Name
    on_bad_record: Literal["error", "skip"]
    tokenizer: LocalPath
    end_of_document: bool | None
    documents: Literal["packed", "separate"]
    val_fraction: Annotated[float, Field(gt=0, lt=1)]


class TokensConfig(DataConfig):
    """Keys of `data=tokens`."""

    seq_len: Count
    train_path: LocalPaths
    val_path: LocalPaths
    dtype: Literal["uint16", "uint32"]


class PartConfig(OpenSection):
    """One part of a mixture: another data group, or only its two datasets."""

    weight: Positive = 1
    train: TargetConfig
    val: TargetConfig


class MixtureConfig(DataConfig):
    """Keys of `data=mixture`."""

    seq_len: Count
    parts: dict[str, PartConfig]


DATA: dict[str, type[DataConfig]] = {  # by the `_target_` of data.train
    DUMMY: DummyTextConfig,
    "gptrain.data.TextDataset.from_corpus": TextConfig,
    "gptrain.data.TokenDataset": TokensConfig,
    "gptrain.data.Mixture": MixtureConfig,
}
