"""Train on a text stream of the Hugging Face package `datasets`, tokenized as it is read.

Config: conf/experiment/stream.yaml. The documents are concatenated, each followed by the end token
of the tokenizer, and cut into samples. Each rank reads its own part, and a resumed run continues
with the next token.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gptrain.core.errors import DataError
from gptrain.data import load_tokenizer


class TextStream(IterableDataset):
    """Samples of T positions of a stream: tokens (T,) and targets (T,), int64.

    The first sample begins with the end token, and every further token is a target once. The last
    tokens of the stream are left out if they do not fill a sample.

    Args:
        path: First argument of `datasets.load_dataset`: the name of a builder, such as `json` or
            `parquet`, or of a dataset.
        options: Further arguments of `load_dataset`, such as `data_files` and `split`.
        tokenizer: Folder of a tokenizer, tokenizer.json, or `bytes`.
        seq_len: Positions T of a sample.
        text_key: Column of the text.

    Raises:
        DataError: If the tokenizer has no end token.
    """

    def __init__(
        self, path: str, options: dict[str, Any], tokenizer: str, seq_len: int, text_key: str
    ):
        self.arguments = (path, options, tokenizer, seq_len, text_key)
        self.tokenizer = load_tokenizer(tokenizer)
        self.seq_len, self.text_key = seq_len, text_key
        if self.tokenizer.end_id is None:
            raise DataError(f"tokenizer {tokenizer} has no token for the end of a document")
        self.token_bytes, self.end_id = self.tokenizer.token_bytes, self.tokenizer.end_id
        self.documents = load_stream(path, options)
        self.tokens = [self.end_id]  # read, and not yet the targets of a sample

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from self._samples()  # samples of a document that was read before a stop
        for document in self.documents:
            # The position in `documents` is behind this document, so its tokens are kept in
            # `tokens` before the first of its samples is yielded.
            self.tokens += [*self.tokenizer.encode(document[self.text_key]).tolist(), self.end_id]
            yield from self._samples()
        self.tokens = [self.end_id]

    def split_by_rank(self, rank: int, world_size: int) -> "TextStream":
        """Return the stream of one rank's documents.

        A rank gets whole files if the ranks divide the number of files. Otherwise it reads all
        files and keeps some documents.

        Args:
            rank: Index of the rank.
            world_size: Number of ranks that read different samples.
        """
        part = TextStream(*self.arguments)
        split = import_module("datasets.distributed").split_dataset_by_node
        part.documents = split(self.documents, rank, world_size)
        return part

    def set_epoch(self, epoch: int) -> None:
        """Begin another pass over the data.

        If the stream of `datasets` is shuffled, each epoch has another order.

        Args:
            epoch: Number of the pass, from 0.
        """
        self.documents.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the documents and the tokens that are not yet in a sample."""
        return {"documents": self.documents.state_dict(), "tokens": list(self.tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of an earlier stream.

        Args:
            state: Dict that the method `state_dict` returned.
        """
        self.documents.load_state_dict(state["documents"])
        self.tokens = list(state["tokens"])

    def _samples(self) -> Iterator[tuple[Tensor, Tensor]]:
        while len(self.tokens) > self.seq_len:
            sample = torch.tensor(self.tokens[: self.seq_len + 1])
            self.tokens = self.tokens[self.seq_len :]
            yield sample[:-1], sample[1:]


def load_stream(path: str, options: dict[str, Any]) -> Any:
    """Return the stream of documents, whose files are read during the run.

    Args:
        path: Name of a builder of `datasets`, such as `json`, or of a dataset.
        options: Further arguments of `datasets.load_dataset`.

    Raises:
        ModuleNotFoundError: If the package `datasets` is missing.
        DataError: If there is no such dataset.
    """
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError:
        hint = "pip install 'gptrain[datasets]'"
        raise ModuleNotFoundError(f"a stream needs the package datasets: {hint}") from None
    try:
        return datasets.load_dataset(path, **options, streaming=True)
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"data.path={Path(path)}: {error}") from None
