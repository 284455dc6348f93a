"""Fine-tune on conversations: the loss counts the assistant's tokens and their end tokens only.

Config: conf/experiment/chat.yaml. Each record of the file has `messages`, a list of dicts of `role`
and `content`, or a question and an answer under two keys.
"""

import hashlib
import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import Dataset

from gptrain.core import labels
from gptrain.core.errors import DataError
from gptrain.data import load_tokenizer
from gptrain.data.sources import format_of, read_records
from gptrain.lit.lightning import data_of
from gptrain.loss import IGNORED
from gptrain.text.chat import ChatFormat, EncodedChat
from gptrain.text.sampling import terminal_text

log = logging.getLogger(__name__)


class ChatDataset(Dataset):
    """Samples of whole conversations: tokens (T,) and targets (T,), int64.

    Args:
        path: JSON lines, or with the package `datasets` any file of records.
        split: `train` or `val`.
        tokenizer: Folder of a tokenizer or a run, tokenizer.json, or `bytes`. If its folder has no
            chat template, it is ChatML.
        seq_len: Positions T of a sample.
        keys: Key of the messages, or the two keys of a question and its answer.
        held_out: Fraction of the records for the validation, or the file of the validation.
        too_long: Treatment of a conversation of more than T tokens. `cut` leaves out its last
            messages, `skip` leaves out the conversation, `error` raises.
        documents: `separate` pads each conversation. `masked` packs conversations that do not see
            each other into one sample, whose third item is the number of the conversation (T,).

    Raises:
        DataError: If the file has no conversation with an answer, or one that cannot be encoded.
    """

    def __init__(
        self, path: str, split: str, tokenizer: str, seq_len: int, keys: str | list[str],
        held_out: float | str, too_long: str, documents: str,
    ):  # fmt: skip
        if too_long not in ("cut", "skip", "error") or documents not in ("masked", "separate"):
            allowed = "allowed: cut, skip, error; masked, separate"
            raise DataError(f"data.too_long={too_long}, data.documents={documents}: {allowed}")
        self.seq_len, self.too_long, self.documents = seq_len, too_long, documents
        self.tokenizer = load_tokenizer(tokenizer)
        self.format = ChatFormat(self.tokenizer)
        self.tokenizer.chat_template = self.format.template  # is saved in the folder of the run
        self.token_bytes, self.end_id = self.tokenizer.token_bytes, self.format.end_id
        self.chats: list[EncodedChat] = []
        self.n_cut = self.n_left_out = 0
        val_path, fraction = (held_out, 0) if isinstance(held_out, str) else (None, held_out)
        file = val_path if val_path and split == "val" else path
        for number, messages in enumerate(read_messages(Path(file).expanduser(), keys)):
            is_val = int((number + 1) * fraction) > int(number * fraction)
            if val_path is None and is_val != (split == "val"):
                continue
            try:
                chat = self._encode(list(messages or []))
            except DataError as error:
                raise DataError(f"{file}: conversation {number + 1}: {error}") from None
            self.n_left_out += chat is None
            self.chats += [chat] if chat else []
        if not self.chats:
            raise DataError(f"{file}: no conversation for data.{split}, {self.n_left_out} left out")
        content = b"".join(chat.tokens.tobytes() for chat in self.chats)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self.samples = [[number] for number in range(len(self.chats))]
        if documents == "masked":
            self.samples = pack_samples([len(chat.tokens) - 1 for chat in self.chats], seq_len)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        chats = [self.chats[number] for number in self.samples[index]]
        tokens = np.full(self.seq_len, self.end_id)
        targets = np.full(self.seq_len, IGNORED)
        documents = np.full(self.seq_len, len(chats))  # the padding has a number of its own
        start = 0
        for number, chat in enumerate(chats):
            end = start + len(chat.tokens) - 1
            tokens[start:end] = chat.tokens[:-1]
            targets[start:end] = np.where(chat.is_target, chat.tokens, IGNORED)[1:]
            documents[start:end] = number
            start = end
        n_items = 3 if self.documents == "masked" else 2
        return tuple(map(torch.from_numpy, (tokens, targets, documents)[:n_items]))

    def describe(self, n_samples: int) -> str:
        """Return the number of conversations and samples and the share of targets, as one line.

        Args:
            n_samples: Number of samples that a run reads, not used.
        """
        n_targets = sum(int(chat.is_target[1:].sum()) for chat in self.chats)
        share = n_targets / sum(len(chat.tokens) for chat in self.chats)
        return (
            f"{labels.count_text(len(self.chats), 'conversation')} in "
            f"{labels.count_text(len(self), 'sample')}, {self.documents} · "
            f"{self.n_cut} cut, {self.n_left_out} left out · {share:.0%} of the tokens are targets"
        )

    def example(self) -> str:
        """Return the text of the first conversation, with its targets between « and »."""
        chat = self.chats[0]
        parts = np.split(chat.tokens, np.flatnonzero(np.diff(chat.is_target)) + 1)
        texts = [terminal_text(self.tokenizer.decode(part)) for part in parts]
        first = int(not chat.is_target[0])  # index of the first part with targets
        return "".join(f"«{text}»" if i % 2 == first else text for i, text in enumerate(texts))

    def _encode(self, messages: list[dict[str, Any]]) -> EncodedChat | None:
        """Return a conversation of at most T positions with an answer, or None to leave it out.

        Args:
            messages: Messages of the conversation. With `too_long=cut` the last ones may be left
                out.

        Raises:
            DataError: If the conversation is too long and `too_long=error`, or cannot be rendered.
        """
        for n_messages in range(len(messages), 0, -1):
            chat = self.format.encode(messages[:n_messages])
            if not chat.is_target[1:].any():
                return None
            if len(chat.tokens) - 1 <= self.seq_len:
                self.n_cut += n_messages < len(messages)
                return chat
            if self.too_long == "error":
                raise DataError(f"{len(chat.tokens)} tokens; try: data.too_long=cut")
            if self.too_long == "skip":
                return None
        return None


class ShowExample(Callback):
    """Shows one conversation of the training set at the start."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the example on rank 0."""
        text = cast(ChatDataset, data_of(trainer).train).example()
        if trainer.is_global_zero:
            log.info(labels.line("example", text))


def read_messages(file: Path, keys: str | list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of each record of a file.

    Args:
        file: JSON lines, or with the package `datasets` any file of records.
        keys: Key of the messages, or the two keys of a question and its answer.

    Raises:
        DataError: If there are more than two keys, or a record has not these keys.
    """
    names = [keys] if isinstance(keys, str) else keys
    if not isinstance(keys, str) and len(keys) != 2:
        raise DataError(f"data.keys={keys}: allowed: messages, or two keys: [question,answer]")
    kind = format_of(file)
    for record, place in read_records(file, "jsonl" if kind == "text" else kind):
        if not isinstance(record, dict) or not record.keys() >= set(names):
            raise DataError(f"{place} has no {' and '.join(names)}; try: data.keys")
        pairs = zip(("user", "assistant"), (record[name] for name in names), strict=False)
        talk = [{"role": role, "content": text} for role, text in pairs]
        yield record[keys] if isinstance(keys, str) else talk


def pack_samples(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Decide which documents share a sample, so that few positions of the samples stay empty.

    The longest document is placed first, each into the fullest sample that has space for it.

    Args:
        lengths: Number of positions of each document, at most `size`.
        size: Number of positions of a sample.

    Returns:
        For each sample, the indices of its documents in `lengths`.
    """
    packed: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free positions, index of the packed sample), sorted
    for item in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, (lengths[item], 0))
        if place == len(spaces):
            spaces.append((size, len(packed)))
            packed.append([])
        space, number = spaces.pop(place)
        packed[number].append(item)
        insort(spaces, (space - lengths[item], number))
    return packed
