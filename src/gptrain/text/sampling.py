"""What a net writes: token after token, each drawn from its own predictions."""

# B sequences, T tokens so far, V vocab

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    `top_k` and `top_p` apply to the distribution after the temperature. A token is drawn only if
    it passes both.

    Attributes:
        temperature: Divisor of the logits. At 0 the most probable token is taken.
        top_k: Number of the most probable tokens that may be drawn. None sets no limit.
        top_p: The most probable tokens may be drawn whose probabilities together reach this value
            (Holtzman et al. 2020, arXiv:1904.09751). None sets no limit.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def weights(self, logits: Tensor) -> Tensor:
        """Turn logits (B, V) into weights (B, V): probabilities up to one factor for each row."""
        logits = logits.float()
        if self.temperature == 0:
            return nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        # Subtract the highest logit: a low temperature would overflow.
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        probabilities = torch.softmax(logits, -1)
        if self.top_k is self.top_p is None:
            return probabilities  # sorting 50,000 probabilities takes longer than a small net
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        kept = torch.ones_like(ranked, dtype=torch.bool)
        if self.top_k is not None:
            kept[:, self.top_k :] = False
        if self.top_p is not None:
            kept &= ranked.cumsum(-1) - ranked < self.top_p  # more probable tokens do not reach it
        return torch.zeros_like(ranked).scatter(-1, order, ranked * kept)


@torch.no_grad()
def generate(
    net: nn.Module,
    prompt: Sequence[int],
    n_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
    cache: bool = False,
) -> Iterator[int]:
    """Yields n_tokens tokens, each as it is drawn, that follow a prompt of at least one.

    The net sees the latest max_seq_len tokens, in evaluation mode.

    Args:
        cache: each position is computed once where the net offers `new_cache` (see gptrain.models),
            while the sequence is within max_seq_len; the tokens are the same.
    """
    tokens = new = torch.tensor([prompt], device=generator.device)  # (1, T)
    limit = getattr(net, "max_seq_len", None) or 2**40  # of a net that has none: beyond any text
    new_cache = getattr(net, "new_cache", None)
    held = new_cache() if cache and new_cache else None
    was_training = net.training
    net.eval()
    try:
        for n_seen in range(len(prompt), len(prompt) + n_tokens):
            is_held = held is not None and n_seen <= limit
            logits = net(new, held) if is_held else net(tokens[:, -limit:])
            new = torch.multinomial(sampling.weights(logits[:, -1]), 1, generator=generator)
            tokens = torch.cat([tokens, new], 1)
            yield int(new)
    finally:
        net.train(was_training)


def printable(text: str) -> str:
    """Text for a terminal: control characters, and bytes that are no text, as a middle dot."""
    kept = (char if char.isprintable() or char in "\n\t" else "·" for char in text)
    return "".join(kept).replace("\N{REPLACEMENT CHARACTER}", "·")
