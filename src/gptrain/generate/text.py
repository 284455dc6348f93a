"""Tokens that come one by one, as text that can be shown at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gptrain.data.tokenizers import Tokenizer

SEPARATOR = "\n---\n"
OPEN = "\N{REPLACEMENT CHARACTER}"  # what decodes to it may be the beginning of a character
OPEN_MAX = 3  # of four bytes, each of which some tokenizers show as one
LONGEST, CONTEXT = 64, 8  # tokens that are decoded again at each step, and what is kept of them


class Numbers:
    """For a run without a tokenizer: token ids with spaces, or commas, between them."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.replace(",", " ").split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


class Text:
    """One prompt and what follows it, up to n_tokens or the first stop text, in sure pieces.

    Not sure is a character whose bytes are not all there, and what may begin a stop text.
    """

    def __init__(
        self, tokenizer: Tokenizer | Numbers, prompt: Sequence[int], n_tokens: int, stop=()
    ):
        self.tokenizer, self.n_tokens, self.stop = tokenizer, n_tokens, stop
        self.tokens, self.n_made, self.ended = list(prompt), 0, False
        self.n_sure, self.held = 0, ""
        self.fresh = self._decode()

    def add(self, token: int) -> None:
        """Takes the next token, unless the text has ended."""
        if self.ended:
            return
        self.tokens.append(token)
        self.n_made += 1
        self.ended = self.n_made == self.n_tokens
        made = self.held + self._decode()
        sure = len(made)
        if ends := [made.index(stop) for stop in self.stop if stop in made]:
            self.ended, sure = True, min(ends)
        elif not self.ended:
            begun = (n for stop in self.stop for n in range(len(stop)) if made.endswith(stop[:n]))
            sure -= max(begun, default=0)
        self.fresh, self.held = self.fresh + made[:sure], made[sure:]

    def take(self) -> str:
        """What has become sure since the last time."""
        piece, self.fresh = self.fresh, ""
        return piece

    def _decode(self) -> str:
        """The characters that the newest tokens make sure; all, at the end of the text."""
        text = self.tokenizer.decode(self.tokens)
        n_open = 0 if self.ended else min(OPEN_MAX, len(text) - len(text.rstrip(OPEN)))
        n_sure = len(text) - n_open
        fresh, self.n_sure = text[self.n_sure : n_sure], max(self.n_sure, n_sure)
        if not n_open and len(self.tokens) > LONGEST:
            self.tokens = self.tokens[-CONTEXT:]
            self.n_sure = len(self.tokenizer.decode(self.tokens))
        return fresh


def in_order(texts: Sequence[Text], steps: Iterable[Sequence[int | None]]) -> Iterator[str]:
    """Pieces of the first text as they are made, then what there is of the second, and so on."""
    row = 0
    for step in steps:
        for text, token in zip(texts, step, strict=True):
            if token is not None:
                text.add(token)
        while row < len(texts):
            yield texts[row].take()
            if not texts[row].ended:
                break
            row += 1
            yield "\n" if row == len(texts) else SEPARATOR
        else:
            return
