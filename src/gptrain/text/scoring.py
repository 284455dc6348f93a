"""Scores of given texts: the probability of each token after the tokens before it."""

# N tokens of a text, T max_seq_len of the net, V vocab

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptrain.data.tokenizers import Tokenizer
from gptrain.loss import token_losses


@dataclass(frozen=True)
class Score:
    """How probable one text is under a net.

    The first token is not scored, because no token comes before it.

    Attributes:
        log_probs: Natural logarithm of the probability of each token but the first, (N - 1,)
            float32 on the CPU, for a text of N tokens. Empty for N < 2.
        n_bytes: Number of bytes of the text in UTF-8, without those of the first token.
    """

    log_probs: Tensor
    n_bytes: int

    @property
    def nats(self) -> float:
        """Cross entropy of the text in nats: the sum over the scored tokens."""
        return -self.log_probs.double().sum().item()

    @property
    def perplexity(self) -> float:
        """Perplexity per token: exp(nats / number of scored tokens). NaN without a scored token."""
        return self.log_probs.double().mean().neg().exp().item()

    @property
    def bits_per_byte(self) -> float:
        """Cross entropy in bits per byte of text. NaN if `n_bytes` is 0."""
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else math.nan


@torch.no_grad()
def score(
    net: nn.Module, tokenizer: Tokenizer, texts: Sequence[str], *, context: int | None = None
) -> list[Score]:
    """Compute how probable each text is under a net, on the net's device, in evaluation mode.

    The net is in its former mode afterwards, also after an error. T is its `max_seq_len`. A text of
    more than T + 1 tokens is read in overlapping windows of T tokens. Each token is scored in the
    first window in which at least `context` tokens come before it. A net without `max_seq_len`
    reads each text at once.

    Args:
        net: Net with the contract of `gptrain.models`.
        tokenizer: Tokenizer of the net, as `gptrain.load(..., with_tokenizer=True)` returns it.
        context: Smallest number of tokens before a scored token in all windows but the first, from
            1 to T. Defaults to T // 2. The net reads about T / (T + 1 - context) times the tokens
            of a long text. With T each token is scored after as many tokens as the net can read.

    Returns:
        One `Score` for each text.

    Raises:
        ValueError: If `context` is not from 1 to T.
        Exception: If the tokenizer cannot encode a text (`Tokenizer.encode`).
    """
    device = next(net.parameters()).device
    was_training = net.training
    # A table of sizes is exact also for a token that is a part of a character, which decode()
    # replaces by U+FFFD. Some tokenizers have none.
    token_bytes = tokenizer.token_bytes  # (V,) or None
    scores = []
    net.eval()
    try:
        for text in texts:
            tokens = torch.as_tensor(tokenizer.encode(text))  # (N,)
            first = tokens[:1].tolist()
            if token_bytes is None:
                n_first_bytes = len(tokenizer.decode(first).encode())
            else:
                n_first_bytes = int(token_bytes[first].sum())
            log_probs = _log_probs(net, tokens.to(device), context)
            scores.append(Score(log_probs, len(text.encode()) - n_first_bytes))
    finally:
        net.train(was_training)
    return scores


def _log_probs(net: nn.Module, tokens: Tensor, context: int | None) -> Tensor:
    """Return the log probabilities (N - 1,) of all tokens (N,) but the first, on the CPU."""
    limit = getattr(net, "max_seq_len", None) or 2**40  # no limit: longer than any text
    context = limit // 2 if context is None else context
    if not 0 < context <= limit:
        raise ValueError(f"context={context}: not from 1 to max_seq_len={limit}")
    parts = [tokens.new_zeros(0, dtype=torch.float32)]
    n_done = 0  # number of targets that are scored, of tokens[1:]
    while n_done < len(tokens) - 1:
        start = max(0, n_done - context + 1)
        window = tokens[start : start + limit + 1]
        logits = net(window[None, :-1])[0, n_done - start :]  # (T + 1 - context, V)
        parts.append(-token_losses(logits, window[n_done - start + 1 :]))
        n_done += len(parts[-1])
    return torch.cat(parts).cpu()
