"""The type of every key of a data group: of one that ships all, of another what our code reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gptrain.config.kinds import (
    WORKERS_MAX,
    Built,
    Count,
    LocalPath,
    LocalPaths,
    Name,
    Open,
    Positive,
    between,
)

DUMMY = "gptrain.data.DummyTextDataset"


class Data(Open):
    """Of any data group; what else its yaml has, its datasets refer to."""

    batch_size: Count
    global_batch_size: Count | None
    num_workers: Annotated[int, between(0, WORKERS_MAX)]
    train: Built
    val: Built
    test: Built | None = None


class DummyText(Data):
    num_samples: Count
    seq_len: Annotated[int, between(2)]


class Text(Data):
    seq_len: Count
    path: LocalPaths | None
    pattern: Name
    format: Literal["text", "jsonl", "parquet"] | None
    text_key: Name
    on_bad_record: Literal["error", "skip"]
    tokenizer: LocalPath
    end_of_document: bool | None
    documents: Literal["packed", "separate"]
    val_fraction: Annotated[float, Field(gt=0, lt=1)]


class Tokens(Data):
    seq_len: Count
    train_path: LocalPaths
    val_path: LocalPaths
    dtype: Literal["uint16", "uint32"]


class Part(Open):
    """Of a mixture: another data group, or its two datasets alone."""

    weight: Positive = 1
    train: Built
    val: Built


class Mixture(Data):
    seq_len: Count
    parts: dict[str, Part]


DATA: dict[str, type[Data]] = {  # by the class of data.train
    DUMMY: DummyText,
    "gptrain.data.TextDataset.from_corpus": Text,
    "gptrain.data.TokenDataset": Tokens,
    "gptrain.data.Mixture": Mixture,
}


def sample_tokens(data: Mapping[str, Any]) -> int | None:
    """Positions of a sample of a checked data group; the last of dummy text is a target only."""
    length, target = data.get("seq_len"), data["train"].get("_target_")
    return length - (target == DUMMY) if isinstance(length, int) else None
