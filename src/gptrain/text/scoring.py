"""Scores of given texts: the probability of each token after the tokens before it."""

# N tokens of a text, T max_seq_len of the net, V vocab

import math
import sys
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
        log_probs: Natural logarithms of the probabilities of the tokens, (N - 1,) float32 on the
            CPU.
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
        n_tokens = len(self.log_probs)
        return math.exp(self.nats / n_tokens) if n_tokens else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Cross entropy in bits per byte of text, comparable across tokenizers.

        NaN if `n_bytes` is 0, as for a text of one token.
        """
        return self.nats / math.log(2) / self.n_bytes if self.n_bytes else math.nan


@torch.no_grad()
def score(
    net: nn.Module, tokenizer: Tokenizer, texts: Sequence[str], *, context: int | None = None
) -> list[Score]:
    """Compute how probable each text is under a net, on the net's device, in evaluation mode.

    The net is in its former mode afterwards, also after an error.

    A text with more tokens than T, the `max_seq_len` of the net, is read in overlapping windows of
    T tokens. Each token is scored in the first window in which at least `context` tokens come
    before it.

    Args:
        net: Net with the contract of `gptrain.models`.
        tokenizer: Tokenizer of the net, as `gptrain.load(..., with_tokenizer=True)` returns it.
        texts: Texts to score.
        context: Smallest number of tokens before a scored token in all windows but the first, from
            1 to T. Defaults to T // 2. The net reads T / (T + 1 - context) times the tokens of a
            long text. With T each token is scored after as many tokens as the net can read.

    Returns:
        One `Score` for each text.

    Raises:
        ValueError: If `context` is not from 1 to T.
        DataError: If a text has a character that the tokenizer has no token for.
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
            tokens = torch.tensor([int(token) for token in tokenizer.encode(text)])  # (N,)
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


@torch.no_grad()
def score_continuations(
    net: nn.Module, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[float]:
    """Return the log probability in nats of each continuation after its context, in one pass.

    Args:
        net: Net with the contract of `gptrain.models`, in evaluation mode.
        pairs: Token ids of a context and of its continuation, at least one each, for at least one
            pair. If both together are longer than the net can read, the beginning is left out:
            first of the context, then of the continuation, whose scores then lack that beginning.
    """
    device = next(net.parameters()).device
    limit = getattr(net, "max_seq_len", None) or sys.maxsize - 1
    rows = [torch.tensor([*context, *tokens][-limit - 1 :]) for context, tokens in pairs]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)  # (B, T + 1)
    log_probs = net(tokens[:, :-1]).float().log_softmax(-1)  # (B, T, V)
    chosen = log_probs.gather(-1, tokens[:, 1:, None])[..., 0].double()  # (B, T)
    return [
        scores[: len(row) - 1][-len(continuation) :].sum().item()
        for scores, row, (_, continuation) in zip(chosen, rows, pairs, strict=True)
    ]


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and the tokens of its continuation.

    Both are encoded as one text, so that they are the tokens that a net sees in a running text. The
    text is cut after as many tokens as the context alone has. As in lm-evaluation-harness, white
    space at the end of the context belongs to the continuation.

    Args:
        tokenizer: Tokenizer of the net.
        context: Text before the continuation.
        continuation: Text that follows, usually with a space at its beginning.

    Raises:
        DataError: If the text has a character that the tokenizer has no token for.
    """
    together = tokenizer.encode(context + continuation).tolist()
    n_context = len(tokenizer.encode(context.rstrip()))
    return together[:n_context], together[n_context:]


def _log_probs(net: nn.Module, tokens: Tensor, context: int | None) -> Tensor:
    """Return the log probabilities (N - 1,) of all tokens but the first, on the CPU.

    The result is empty for a text of one token or none.

    Args:
        net: Net in evaluation mode.
        tokens: Token ids of a text, (N,), on the device of the net.
        context: Smallest number of tokens before a scored token in all windows but the first. None
            for half of the net's `max_seq_len`.

    Raises:
        ValueError: If `context` is not from 1 to `max_seq_len`.
    """
    limit = getattr(net, "max_seq_len", None) or max(2, len(tokens))
    context = limit // 2 if context is None else context
    if not 0 < context <= limit:
        raise ValueError(f"context={context}: not from 1 to max_seq_len={limit}")
    parts = [tokens.new_zeros(0, dtype=torch.float32)]
    n_done = 0  # number of targets that are scored, of tokens[1:]
    while n_done < len(tokens) - 1:
        start = max(0, n_done - context + 1) if n_done else 0
        window = tokens[start : start + limit + 1]
        logits = net(window[None, :-1])[0, n_done - start :]  # (T + 1 - context, V)
        parts.append(-token_losses(logits, window[n_done - start + 1 :], 0.0, 0.0))
        n_done += len(parts[-1])
    return torch.cat(parts).cpu()
