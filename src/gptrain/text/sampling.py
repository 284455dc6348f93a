"""Sampling of tokens from the predictions of a net, one after another."""

# B sequences, T tokens so far, V vocab

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# All kernels of attention but cuDNN, which makes a plan for each length of the text: 0.4 s per
# token on a B200 (github.com/modelscope/FunASR/issues/3704).
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Sampling:
    """Settings of the distribution from which the next token is drawn.

    A token is drawn only if it passes `top_k` and `top_p`, which apply after the temperature.

    Attributes:
        temperature: Divisor of the logits, not negative. At 0 the most probable token is taken.
        top_k: Number of the most probable tokens that may be drawn, at least 1. None sets no limit.
        top_p: Probability above 0. Only tokens of the smallest set of most probable tokens that
            together reach it may be drawn (nucleus sampling, Holtzman et al. 2020,
            arXiv:1904.09751). None sets no limit.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def weights(self, logits: Tensor) -> Tensor:
        """Turn logits (B, V) into the weights (B, V), fp32, with which the next token is drawn.

        A weight is the probability of a token, or 0 if it may not be drawn. The sum of a row may
        therefore be less than 1, as torch.multinomial allows.
        """
        logits = logits.float()
        if self.temperature == 0:
            return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # Subtract the highest logit, so that a low temperature causes no overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        probabilities = torch.softmax(logits, -1)
        if self.top_k is self.top_p is None:
            return probabilities  # no sort: for 50,000 tokens it takes longer than a small net
        ranked, order = probabilities.sort(descending=True, stable=True)
        # Keep a token if the more probable tokens together do not reach top_p.
        ranked[ranked.cumsum(-1) - ranked >= (math.inf if self.top_p is None else self.top_p)] = 0
        ranked[:, ranked.shape[-1] if self.top_k is None else self.top_k :] = 0
        return torch.zeros_like(ranked).scatter(-1, order, ranked)


@torch.no_grad()
def generate(
    net: nn.Module, prompt: Sequence[int], n_tokens: int, sampling: Sampling,
    generator: torch.Generator, cache: bool = False, stop_ids: Collection[int] = (),
) -> Iterator[int]:  # fmt: skip
    """Draw tokens that follow a prompt, and yield each as soon as it is drawn.

    The net reads the last `max_seq_len` tokens, or all if it has no such attribute. The first
    `next` puts it into evaluation mode, and the end of the iterator into its former mode again. If
    ranks hold parts of the net, all must iterate, with equal generators.

    Args:
        net: Net with the contract of `gptrain.models`.
        prompt: Token ids of the prompt, at least one.
        n_tokens: Largest number of tokens to draw.
        generator: Generator of the random numbers, on the device of the net.
        cache: True to compute each position only once, if the net has `new_cache` and while the
            sequence has at most `max_seq_len` tokens. The logits are the same up to rounding.
        stop_ids: Ids of the tokens that end the text. They are not yielded.
    """
    tokens = new = torch.tensor([prompt], device=generator.device)  # (1, T)
    limit = getattr(net, "max_seq_len", None) or 2**40  # no limit: longer than any text
    kv_cache = getattr(net, "new_cache", lambda: None)() if cache else None
    was_training = net.training
    net.eval()
    try:
        for length in range(len(prompt), len(prompt) + n_tokens):
            uses_cache = kv_cache is not None and length <= limit
            with sdpa_kernel(_KERNELS):
                logits = net(new, kv_cache) if uses_cache else net(tokens[:, -limit:])
            new = torch.multinomial(sampling.weights(logits[:, -1]), 1, generator=generator)
            if int(new) in stop_ids:
                return
            tokens = torch.cat([tokens, new], 1)
            yield int(new)
    finally:
        net.train(was_training)


def terminal_text(text: str) -> str:
    """Return a text in which a middle dot replaces each character that could confuse a terminal.

    These are the characters for which `str.isprintable` is False, except newline and tab: control
    and format characters, and spaces other than " ". A dot also replaces U+FFFD, which stands for
    bytes that are not UTF-8.
    """
    kept = (char if char.isprintable() or char in "\n\t" else "·" for char in text)
    return "".join(kept).replace("\N{REPLACEMENT CHARACTER}", "·")
