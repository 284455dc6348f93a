"""Generation of text from prompts: as strings, or printed token by token."""

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import nn

from gptrain.core.errors import DataError, ending_of
from gptrain.data.tokenizers import Tokenizer
from gptrain.text import sampling
from gptrain.text.chat import ChatFormat
from gptrain.text.sampling import Sampling, terminal_text

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoded for bytes that are no complete character


def generate(
    net: nn.Module, tokenizer: Tokenizer, prompts: Sequence[str], n_tokens: int = 256, *,
    temperature: float = 0.7, top_k: int | None = None, top_p: float | None = None,
    stop: Sequence[str] = (), seed: int = 0,
) -> list[str]:  # fmt: skip
    """Generate the text that follows each prompt, and return it. This is `gptrain.generate`.

    The net runs on its own device, in evaluation mode, and is in its former mode afterwards. A
    continuation ends after `n_tokens`, at one of the tokenizer's `stop_ids`, or before the first
    text of `stop`.

    Args:
        net: The net, with the contract of `gptrain.models`.
        tokenizer: The tokenizer that the net was trained with.
        prompts: Texts of at least one token each.
        n_tokens: Number of tokens to generate for each prompt, at most.
        temperature: Divisor of the logits, see `Sampling`.
        top_k: Limit of the number of tokens, see `Sampling`.
        top_p: Limit of the total probability, see `Sampling`.
        stop: Texts that end a continuation and are not part of it.
        seed: Seed of one random generator for all prompts. A prompt's continuation therefore
            depends on the prompts before it.

    Returns:
        The continuation of each prompt, without the prompt.

    Raises:
        DataError: If a prompt has no token.
        Exception: If the tokenizer cannot encode a prompt (`Tokenizer.encode`).
    """
    writer = Writer(net, tokenizer, Sampling(temperature, top_k, top_p), n_tokens, stop, seed)
    return ["".join(writer.answer(prompt)) for prompt in prompts]


class Writer:
    """Continues prompts with one net and one random generator, as soon as each token is drawn.

    Args:
        net: Net with the contract of `gptrain.models`, on its device.
        n_tokens: Largest number of tokens of an answer.
        stop: Texts that end an answer and are not part of it.
        seed: Seed of the random generator.
        is_chat: True if a prompt is the user's next message of a conversation, which the chat
            template renders.

    Raises:
        DataError: If `is_chat`, and `ChatFormat` refuses the template.
    """

    def __init__(
        self, net: nn.Module, tokenizer: Tokenizer, sampling: Sampling, n_tokens: int,
        stop: Sequence[str], seed: int, is_chat: bool = False,
    ):  # fmt: skip
        self.net, self.tokenizer = net, tokenizer
        self.sampling, self.n_tokens, self.stop = sampling, n_tokens, stop
        self.generator = torch.Generator(next(net.parameters()).device).manual_seed(seed)
        self.messages: list[dict[str, str]] = []  # conversation so far
        self.format = ChatFormat(tokenizer) if is_chat else None

    def answer(self, prompt: str) -> Iterator[str]:
        """Yield the text that follows a prompt, in pieces.

        In a chat, the prompt and the complete answer are added to the conversation at the end.

        Raises:
            DataError: If the prompt has no token, or if the chat template refuses the conversation.
            Exception: If the tokenizer cannot encode the prompt (`Tokenizer.encode`).
        """
        question = {"role": "user", "content": prompt}
        stop_ids = [*self.tokenizer.stop_ids]
        if self.format:
            tokens = self.format.encode_prompt([*self.messages, question])
            stop_ids.append(self.format.end_id)
        elif not (tokens := self.tokenizer.encode(prompt).tolist()):
            raise DataError(f"prompt {prompt!r}: has no tokens")
        drawn = sampling.generate(
            self.net, tokens, self.n_tokens, self.sampling, self.generator, True, stop_ids
        )
        text = yield from decode_until(self.tokenizer, tokens, drawn, self.stop)
        self.messages += [question, {"role": "assistant", "content": text}]

    def write(self, prompt: str) -> None:
        """Print the `answer` to a prompt, and in front of it the prompt unless this is a chat.

        In a terminal their `terminal_text` is printed. The errors are those of `answer`.
        """
        for piece in chain([] if self.format else [prompt], self.answer(prompt)):
            print(terminal_text(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        print(flush=True)

    def run_interactively(self) -> None:
        """Print the answer to each line of stdin until its end (Ctrl-D in a terminal).

        Ctrl-C ends the current answer, which does not become part of a conversation. A DataError of
        `answer` is printed to stderr, and the next line is read.
        """
        mark = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                self.write(input(mark))
            except DataError as error:
                print(ending_of(error).line, file=sys.stderr)
            except KeyboardInterrupt:
                print(" (press Ctrl-D to quit)")
            except EOFError:
                return print(end="\n" if mark else "")


def decode_until(
    tokenizer: Tokenizer, prompt: list[int], drawn: Iterable[int], stop: Sequence[str]
) -> Generator[str, None, str]:
    """Yield the text that tokens add to that of a prompt, in pieces, up to the first stop text.

    A character of several tokens is yielded when its last token is known. Characters that may begin
    a stop text are held back until the text is known. A piece may be empty. The generator returns
    all pieces as one text.

    Args:
        prompt: Token ids of the prompt, which are decoded with the first tokens.
        drawn: Token ids that follow the prompt. Iteration stops at a stop text.
        stop: Texts that end the result and are not part of it.
    """
    n_tail = 8  # the text of a token may depend on the tokens before it
    while n_tail < len(prompt) and tokenizer.decode(prompt[-n_tail:]).startswith(REPLACEMENT):
        n_tail += 1  # the tail begins within a character
    tokens = prompt[-n_tail:]
    n_before, n_shown, text = len(tokenizer.decode(tokens)), 0, ""
    n_held = max(map(len, stop), default=1) - 1
    for token in drawn:
        tokens.append(token)
        text = tokenizer.decode(tokens)[n_before:]
        if starts := [text.index(end) for end in stop if end in text]:
            text = text[: min(starts)]
            break
        n_known = max(n_shown, len(text.rstrip(REPLACEMENT)) - n_held)
        yield text[n_shown:n_known]
        n_shown = n_known
    yield text[n_shown:]
    return text
