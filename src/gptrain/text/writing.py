"""Generation of text from prompts: as strings, or printed token by token."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from gptrain.core.errors import ConfigError, DataError, ending_of
from gptrain.data.tokenizers import Tokenizer
from gptrain.text import sampling
from gptrain.text.chat import ChatFormat
from gptrain.text.sampling import Sampling, terminal_text


def generate(
    net: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str], n_tokens: int = 256, *,
    temperature: float = 0.7, top_k: int | None = None, top_p: float | None = None,
    stop: Sequence[str] = (), seed: int = 0,
) -> list[str]:  # fmt: skip
    """Generate the text that follows each prompt, and return it. This is `gptrain.generate`.

    The net runs on its own device. A continuation ends after `n_tokens`, at one of the tokenizer's
    `stop_ids` or before a text of `stop`.

    Args:
        net: The net, with the contract of `gptrain.models`.
        tokenizer: The tokenizer that the net was trained with.
        prompts: Texts of at least one token each.
        n_tokens: Number of tokens to generate for each prompt, at most.
        temperature: Divisor of the logits. At 0 the most probable token is taken.
        top_k: Number of the most probable tokens that may be drawn. None sets no limit.
        top_p: Total probability of the most probable tokens that may be drawn (nucleus sampling).
            None sets no limit.
        stop: Texts that end a continuation, which ends before the first of them.
        seed: Seed of one random generator for all prompts. A prompt's continuation therefore
            depends on the prompts before it.

    Returns:
        The continuation of each prompt, without the prompt.

    Raises:
        ValueError: If a prompt has no token.
        DataError: If a prompt has a character that the tokenizer has no token for.
    """
    generator = torch.Generator(next(net.parameters()).device).manual_seed(seed)
    settings = Sampling(temperature, top_k, top_p)
    texts = []
    for prompt in prompts:
        tokens = tokenizer.encode(prompt).tolist()
        if not tokens:
            raise ValueError(f"prompt {prompt!r}: has no tokens")
        drawn = sampling.generate(
            net, tokens, n_tokens, settings, generator, cache=True, stop_ids=tokenizer.stop_ids
        )
        texts.append("".join(cut_at_stop(stop, decode_pieces(tokenizer, tokens, drawn))))
    return texts


class Writer:
    """Prints continuations of prompts, as soon as each token is drawn.

    All prompts share one net and one random generator.

    Args:
        cfg: Configuration of the command, `gptrain.generate.__main__.GenerateRun`.
        net: Net with the contract of `gptrain.models`, on `device`.
        tokenizer: Tokenizer of the net.
        device: Device of the net.

    Raises:
        DataError: If the chat template is to be used and is not valid.
    """

    def __init__(self, cfg: Any, net: nn.Module, tokenizer: Tokenizer, device: str):
        self.cfg, self.net, self.tokenizer = cfg, net, tokenizer
        self.stop = [cfg.stop] if isinstance(cfg.stop, str) else cfg.stop
        self.sampling = Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
        self.generator = torch.Generator(device).manual_seed(cfg.seed)
        self.messages: list[dict[str, str]] = []  # conversation so far
        is_chat = cfg.interactive and tokenizer.chat_template if cfg.chat is None else cfg.chat
        self.format = ChatFormat(tokenizer) if is_chat else None

    def write(self, prompt: str) -> None:
        """Print a prompt and its continuation.

        In a chat the prompt is the user's next message, and only the answer is printed. Prompt and
        answer are then added to the conversation.

        Args:
            prompt: Text to continue or to answer.

        Raises:
            ConfigError: If the prompt has no token.
            DataError: If the prompt has a character without a token, or the chat template refuses
                the conversation.
        """
        question = {"role": "user", "content": prompt}
        stop_ids = [*self.tokenizer.stop_ids]
        if self.format:
            tokens = self.format.encode_prompt([*self.messages, question])
            stop_ids.append(self.format.end_id)
        elif not (tokens := self.tokenizer.encode(prompt).tolist()):
            raise ConfigError.of("prompt", prompt, "has no tokens")
        drawn = sampling.generate(
            self.net, tokens, self.cfg.n_tokens, self.sampling, self.generator, True, stop_ids
        )
        pieces = cut_at_stop(self.stop, decode_pieces(self.tokenizer, tokens, drawn))
        answer = ""
        for piece in chain([] if self.format else [prompt], pieces):
            print(terminal_text(piece) if sys.stdout.isatty() else piece, end="", flush=True)
            answer += piece
        print(flush=True)
        self.messages += [question, {"role": "assistant", "content": answer}]

    def run_interactively(self) -> None:
        """Print the continuation of each line of stdin until its end or Ctrl-D.

        Ctrl-C ends the current continuation. The error of a prompt that cannot be continued is
        printed, and the next line is read.
        """
        is_terminal = sys.stdin.isatty()
        while True:
            try:
                self.write(input("> " if is_terminal else ""))
            except (ConfigError, DataError) as error:
                print(ending_of(error).line, file=sys.stderr)
            except KeyboardInterrupt:
                print(" (press Ctrl-D to quit)")
            except EOFError:
                if is_terminal:
                    print()
                return


def decode_pieces(
    tokenizer: Tokenizer, tokens: list[int], new_tokens: Iterable[int]
) -> Iterator[str]:
    """Yield the text that each new token adds to that of `tokens`, to which it is appended.

    A character of several tokens is yielded when its last token is known.
    """
    start = max(0, len(tokens) - 8)  # the text of a token may depend on the tokens before it
    shown = tokenizer.decode(tokens[start:])
    for token in new_tokens:
        tokens.append(token)
        text = tokenizer.decode(tokens[start:])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            start = max(0, len(tokens) - 8)
            shown = tokenizer.decode(tokens[start:])
    yield tokenizer.decode(tokens[start:])[len(shown) :]


def cut_at_stop(stop: Sequence[str], pieces: Iterable[str]) -> Iterator[str]:
    """Yield pieces of text up to the first stop text, without it, as soon as they are known."""
    pending = ""
    for piece in pieces:
        pending += piece
        positions = [pending.index(text) for text in stop if text in pending]
        if positions:
            yield pending[: min(positions)]
            return
        # Lengths of the beginnings of stop texts with which the pending text ends
        open_lengths = (n for text in stop for n in range(len(text)) if pending.endswith(text[:n]))
        n_safe = len(pending) - max(open_lengths, default=0)
        yield pending[:n_safe]
        pending = pending[n_safe:]
    yield pending
