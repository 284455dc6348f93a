"""What a net thinks of given texts: how probable each token is after those before it."""

# N tokens of a text, T tokens of a window, V vocab

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptrain.data.tokenizers import Tokenizer
from gptrain.loss import losses_of_rows


@dataclass(frozen=True)
class Score:
    """Of one text without its first token, which nothing comes before."""

    log_probs: Tensor  # natural logarithms of the tokens' probabilities, (N - 1,) float32
    n_bytes: int  # in UTF-8

    @property
    def nats(self) -> float:
        """Cross entropy of the whole text."""
        return -self.log_probs.double().sum().item()

    @property
    def perplexity(self) -> float:
        """e to the mean of nats per token; NaN of a text of fewer than two tokens."""
        n_tokens = len(self.log_probs)
        return math.exp(self.nats / n_tokens) if n_tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Comparable over tokenizers; NaN of a text of fewer than two tokens."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else math.nan


@torch.no_grad()
def score(
    net: nn.Module, tokenizer: Tokenizer, texts: Sequence[str], *, context: int | None = None
) -> list[Score]:
    """The score of each text, by the net on its device, in evaluation mode.

    A text that is longer than the net's max_seq_len is read in windows of that length, T, and each
    token is scored in the first window in which `context` tokens or more come before it.

    Args:
        tokenizer: of the net, as of `gptrain.load(..., with_tokenizer=True)`.
        context: from 1 to T, None: T // 2. T / (T + 1 - context) times as many tokens are read as
            there are; at T every token is scored after as many as the net can see.

    Raises: ValueError for a context that the net does not have.
    """
    device, was_training = next(net.parameters()).device, net.training
    net.eval()
    try:
        scores, sizes = [], tokenizer.token_bytes  # (V,); a part of a character is no text
        for text in texts:
            tokens = torch.tensor([int(token) for token in tokenizer.encode(text)])  # (N,)
            first = tokens[:1].tolist()
            n_first = len(tokenizer.decode(first).encode()) if sizes is None else sizes[first].sum()
            log_probs = _log_probs(net, tokens.to(device), context)
            scores.append(Score(log_probs, len(text.encode()) - int(n_first)))
        return scores
    finally:
        net.train(was_training)


def _log_probs(net: nn.Module, tokens: Tensor, context: int | None) -> Tensor:
    limit = getattr(net, "max_seq_len", None) or max(2, len(tokens))
    context = limit // 2 if context is None else context
    if not 0 < context <= limit:
        raise ValueError(f"context={context}: not from 1 to max_seq_len={limit}")
    parts, n_done = [tokens.new_zeros(0, dtype=torch.float32)], 0  # targets that are scored
    while n_done < len(tokens) - 1:
        start = max(0, n_done - context + 1) if n_done else 0
        window = tokens[start : start + limit + 1]
        logits = net(window[None, :-1])[0, n_done - start :]  # (T - context, V)
        parts.append(-losses_of_rows(logits, window[n_done - start + 1 :], 0.0, 0.0))
        n_done += len(parts[-1])
    return torch.cat(parts).cpu()
