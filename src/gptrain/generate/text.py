"""Tokens that come one by one, shown at once as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from omegaconf import DictConfig
from torch import nn

from gptrain.data.tokenizers import Tokenizer
from gptrain.problems import ConfigError
from gptrain.sampling import Sampling, generate, printable

OPEN = "\N{REPLACEMENT CHARACTER}"  # what decodes to it may be the beginning of a character


class Writer:
    """Continues prompts by one net, with one series of random numbers."""

    def __init__(self, cfg: DictConfig, net: nn.Module, tokenizer: Tokenizer | None, device: str):
        self.cfg, self.net, self.tokenizer = cfg, net, tokenizer or Numbers()
        self.stop = [cfg.stop] if isinstance(cfg.stop, str) else cfg.stop
        self.sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
        self.generator = torch.Generator(device).manual_seed(cfg.seed)

    def write(self, prompt: str) -> None:
        """Prints a prompt with what follows it, and on stderr how fast.   Raises: ConfigError."""
        start_s, tokens = time.perf_counter(), [int(t) for t in self.tokenizer.encode(prompt)]
        n_given, size = len(tokens), getattr(self.net, "vocab_size", sys.maxsize)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < size:
            wrong = f"not one or more tokens of the net, which has 0 to {size - 1}"
            raise ConfigError.of("prompt", prompt, wrong)
        options = (self.sampling, self.generator, self.cfg.cache)
        made = generate(self.net, tokens, self.cfg.n_tokens, *options)
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
            wrong, attempt = "no tokenizer lies in the run's folder", "token ids, as in '1 2 3'"
            raise ConfigError.of("prompt", text, wrong, attempt=attempt) from None

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


def characters(
    tokenizer: Tokenizer | Numbers, tokens: list[int], made: Iterable[int]
) -> Iterator[str]:
    """The text of tokens, then what each of those made adds to it, in whole characters.

    Args:
        tokens: of the prompt; each one that is made is added.
    """
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
