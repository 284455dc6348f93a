"""Types of the `data` group.

The groups that ship with gptrain have a type for each of their keys. For any other data group only
the keys of `DataConfig` are typed.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from gptrain.core import value_types as types
from gptrain.core.value_types import Count, KeepsResult, OpenSection, TargetConfig, between, chosen


def find_data_kind(node: dict[str, Any]) -> object:
    """Return the key of DATA for a data group, or a name that is not in DATA for another group."""
    if "_target_" in node:
        return "LightningDataModule"
    train = node.get("train")
    return train.get("_target_") if isinstance(train, dict) else None


class DataConfig(OpenSection):
    """Keys that every data group has. `extra` has the others, for arguments of the datasets."""

    # The resulting global batch size is compared on a resume.
    batch_size: Annotated[Count, KeepsResult]
    global_batch_size: Annotated[Count | None, KeepsResult]
    num_workers: Annotated[int, between(0, types.WORKERS_MAX), KeepsResult]
    train: TargetConfig
    val: TargetConfig
    test: TargetConfig | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """Given keys and values that are not in every data group, such as `seq_len`."""
        return {k: v for k, v in self.plain().items() if k not in DataConfig.model_fields}

    @property
    def sample_tokens(self) -> int | None:
        """Number of positions of a sample, or None if the group has no integer `seq_len`."""
        length = self.extra.get("seq_len")
        return length if type(length) is int else None

    @property
    def masks_documents(self) -> bool:
        """True if `data.documents` is `masked`: attention does not cross document boundaries."""
        return self.extra.get("documents") == "masked"


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


class DummyTextConfig(DataConfig):
    """Keys of `data=dummy_text`, which generates samples."""

    num_samples: Count
    seq_len: Annotated[int, between(2)]
    weight: types.Positive = 1  # as a part of a mixture

    @property
    def sample_tokens(self) -> int | None:
        """Number of positions of a sample: the last of `seq_len` tokens is a target only."""
        return self.seq_len - 1 if self.seq_len else None


class TextConfig(DataConfig):
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
    weight: types.Positive = 1  # as a part of a mixture


class TokensConfig(DataConfig):
    """Keys of `data=tokens`, which reads files of token ids."""

    seq_len: Count
    train_path: types.LocalPaths
    val_path: types.LocalPaths
    dtype: Literal["uint16", "uint32", "int64"]
    weight: types.Positive = 1  # as a part of a mixture


class PartConfig(OpenSection):
    """Part of a mixture with datasets of the user. A part that ships has all keys of its group."""

    weight: types.Positive = 1
    train: TargetConfig
    val: TargetConfig


# Type of a data group that ships, by the `_target_` of its `train`, and of a LightningDataModule.
DATA: dict[str, type[DataConfig]] = {
    "gptrain.data.DummyTextDataset": DummyTextConfig,
    "gptrain.data.TextDataset": TextConfig,
    "gptrain.data.TokenDataset": TokensConfig,
}


class MixtureConfig(DataConfig):
    """Keys of `data=mixture`, which draws samples from several datasets."""

    seq_len: Count
    parts: dict[str, Annotated[PartConfig, chosen(dict(DATA), find_data_kind)]]

    @property
    def masks_documents(self) -> bool:
        """True if a part has documents that do not see each other."""
        parts = [part.plain() for part in self.parts.values()]
        return any(part.get("documents") == "masked" for part in parts)


DATA |= {"gptrain.data.Mixture": MixtureConfig, "LightningDataModule": DataModuleConfig}
