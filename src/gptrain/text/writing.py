"""What a net writes, as text: whole, or shown as it is made."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from gptrain.core.errors import ConfigError
from gptrain.data.tokenizers import Tokenizer
from gptrain.text import sampling
from gptrain.text.sampling import Sampling, printable

OPEN = "\N{REPLACEMENT CHARACTER}"  # what decodes to it may be the beginning of a character


def generate(
    net: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    n_tokens: int = 256,
    *,
    temperature: float = 0.7,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Generate the text that follows each prompt, on the device of the net.

    Args:
        net: The net, with the contract of `gptrain.models`.
        tokenizer: The tokenizer that the net was trained with.
        prompts: Texts of at least one token each.
        n_tokens: Number of tokens to generate for each prompt, at most.
        temperature: Divisor of the logits. At 0 the most probable token is taken.
        top_k: Limit of `gptrain.text.sampling.Sampling`.
        top_p: Limit of `gptrain.text.sampling.Sampling`.
        stop: Texts that end a continuation. It ends before the first of them.
        seed: Seed of the random numbers, which the prompts draw one after another.

    Returns:
        The continuation of each prompt, without the prompt.

    Raises:
        ValueError: If a prompt has no token.
    """
    generator = torch.Generator(next(net.parameters()).device).manual_seed(seed)
    how, texts = Sampling(temperature, top_k, top_p), []
    for prompt in prompts:
        tokens = [int(token) for token in tokenizer.encode(prompt)]
        if not tokens:
            raise ValueError(f"prompt {prompt!r}: not one or more tokens")
        made = sampling.generate(net, tokens, n_tokens, how, generator, cache=True)
        pieces = characters(tokenizer, tokens, made)
        next(pieces)  # the prompt
        texts.append("".join(until(stop, pieces)))
    return texts


class Options(Protocol):
    """Keys of the command `gptrain.generate`."""

    seed: int
    n_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: str | list[str]
    cache: bool


class Writer:
    """Continues prompts by one net, with one series of random numbers."""

    def __init__(self, cfg: Options, net: nn.Module, tokenizer: Tokenizer | None, device: str):
        self.net, self.tokenizer = net, tokenizer or Numbers()
        self.stop = [cfg.stop] if isinstance(cfg.stop, str) else cfg.stop
        how = Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
        generator = torch.Generator(device).manual_seed(cfg.seed)
        self.options = (cfg.n_tokens, how, generator, cfg.cache)

    def write(self, prompt: str) -> None:
        """Prints a prompt with what follows it, and on stderr how fast.   Raises: ConfigError."""
        start_s, tokens = time.perf_counter(), [int(t) for t in self.tokenizer.encode(prompt)]
        n_given, size = len(tokens), getattr(self.net, "vocab_size", sys.maxsize)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < size:
            message = f"not one or more tokens of the net, which has 0 to {size - 1}"
            raise ConfigError.of("prompt", prompt, message)
        made = sampling.generate(self.net, tokens, *self.options)
        pieces = characters(self.tokenizer, tokens, made)
        for piece in chain([next(pieces)], until(self.stop, pieces)):  # no stop is in the prompt
            print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        print(flush=True)
        seconds, n_made = time.perf_counter() - start_s, len(tokens) - n_given
        said = f"{n_made} tokens in {seconds:.2f} s, {n_made / seconds:.0f} tokens/s"
        print(said, file=sys.stderr, flush=True)

    def answer(self) -> None:
        """Continues each line that is typed until Ctrl-D; Ctrl-C ends one text."""
        is_typed = sys.stdin.isatty()
        while True:
            try:
                self.write(input("> " if is_typed else ""))
            except ConfigError as error:
                print(error, file=sys.stderr)
            except KeyboardInterrupt:
                print(" (Ctrl-D ends it)")
            except EOFError:
                return print(end="\n" * is_typed)


class Numbers:
    """For a run without a tokenizer: token ids with spaces, or commas, between them."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            message, hint = "no tokenizer lies in the run's folder", "token ids, as in '1 2 3'"
            raise ConfigError.of("prompt", text, message, hint=hint) from None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


def characters(
    tokenizer: Tokenizer | Numbers, tokens: list[int], made: Iterable[int]
) -> Iterator[str]:
    """The text of tokens, to which those made are added, then what each adds: whole characters."""
    start = end = 0  # what follows end is new, and decoded with the piece before it as context
    for new in chain([[]], zip(made)):
        tokens += new
        text = tokenizer.decode(tokens[start:])
        if not text.endswith(OPEN):
            yield text[len(tokenizer.decode(tokens[start:end])) :]
            start, end = end, len(tokens)
    yield tokenizer.decode(tokens[start:])[len(tokenizer.decode(tokens[start:end])) :]


def until(stop: Sequence[str], pieces: Iterable[str]) -> Iterator[str]:
    """Pieces up to the first stop text; what may begin one is held back until it does not."""
    held = ""
    for piece in pieces:
        held += piece
        if ends := [held.index(one) for one in stop if one in held]:
            yield held[: min(ends)]
            return
        begun = (n for one in stop for n in range(len(one)) if held.endswith(one[:n]))
        n_sure = len(held) - max(begun, default=0)
        yield held[:n_sure]
        held = held[n_sure:]
    yield held
