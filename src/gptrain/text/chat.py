"""Conversations as tokens: a Jinja chat template, and the tokens that the assistant writes.

A conversation is a list of messages, each a dict of `role` and `content`, as transformers takes it.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from gptrain.core.errors import DataError
from gptrain.data.tokenizers import Tokenizer

Messages: TypeAlias = Sequence[Mapping[str, Any]]
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] \
+ '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
IM_END = "<|im_end|>"
# Unicode reserves these two characters for internal use of programs. BREAK marks a place at which
# the text is cut before it is encoded, and PROBE stands for the content of a message.
BREAK, PROBE = "\ufdd0", "\ufdd1"


class EncodedChat(NamedTuple):
    """Tokens of a conversation.

    Attributes:
        tokens: Token ids (N,) int64.
        is_target: Whether a token is written by the assistant: the content of its messages and the
            end token of each, (N,) bool.
    """

    tokens: np.ndarray
    is_target: np.ndarray


class ChatFormat:
    """Renders conversations with the chat template of a tokenizer and encodes them.

    The tokens are those that transformers' `apply_chat_template` makes. The name of a control token
    in the text of a message does not become that token, whereas transformers lets it.

    Args:
        tokenizer: Tokenizer of the net.
        template: Jinja template. None takes that of the tokenizer, or ChatML if it has none.

    Attributes:
        template: Jinja template that is used.
        control: Names of the control tokens, the longest first.
        end_token: Control token that ends the assistant's messages.
        end_id: Id of `end_token`.

    Raises:
        DataError: If the template is not valid or writes no token that ends an answer, or if there
            is no template and the tokenizer has no token that can end a message.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None):
        self.tokenizer = tokenizer
        self.template = template or tokenizer.chat_template or chatml_for(tokenizer)
        # Some folders do not mark the control tokens of their template as special.
        names = re.findall(r"<[^<>\s]+>|\[/?[A-Z_]+\]", self.template)
        in_template = {name for name in names if tokenizer.token_to_id(name) is not None}
        self.control = sorted({*tokenizer.control_tokens, *in_template} - {""}, key=len)[::-1]
        self._template = _compile(self.template)
        self._values = {**tokenizer.special_tokens, "tools": None, "documents": None}
        question: Messages = [{"role": "user", "content": "a"}]
        talk = self._render([*question, {"role": "assistant", "content": PROBE}], False)
        ending = _search(self.control, talk, talk.find(PROBE))
        if ending is None:
            raise DataError("the chat template writes no control token at the end of an answer")
        self.end_token = ending[0]
        self.end_id = cast(int, tokenizer.token_to_id(self.end_token))
        # An answer may contain other names of the template, such as <think> around its reasoning.
        frame = self._render(question, True) + self.end_token
        self._frame_control = [name for name in self.control if name in frame]
        in_answer = {*self._frame_control, *tokenizer.control_tokens}
        self._answer_control = [name for name in self.control if name in in_answer]

    def encode(self, messages: Messages, add_generation_prompt: bool = False) -> EncodedChat:
        """Return the tokens of a conversation.

        Args:
            messages: Messages of the conversation.
            add_generation_prompt: Whether the text that begins the assistant's next message is
                appended.

        Raises:
            DataError: If a message is no mapping, if the template refuses the messages, or if a
                text has a character that the tokenizer has no token for.
        """
        safe = []
        for message in messages:
            if not isinstance(message, Mapping):
                raise DataError(f"needed: messages of role and content, not {message!r:.40}")
            is_answer = message.get("role") == "assistant"
            control = self._answer_control if is_answer else self.control
            safe.append(self._without_control(message, control))
        text = self._render(safe, add_generation_prompt)
        tokens, starts, position = [], [], 0
        for piece in text.split(BREAK):
            new_tokens, new_starts = self.tokenizer.encode_special(piece)
            tokens.append(new_tokens)
            starts.append(new_starts + position)
            position += len(piece) + len(BREAK)
        place = np.concatenate(starts)  # (N,) position of the first character of each token
        following = np.append(place[1:], len(text))
        is_target = np.zeros(len(place), dtype=bool)
        for number, message in enumerate(safe):
            if message.get("role") == "assistant":
                begin, end = self._find_answer(text, safe, number, add_generation_prompt)
                # A token may begin with the white space before the answer.
                is_target |= ((place >= begin) | (following > begin)) & (place < end)
        return EncodedChat(np.concatenate(tokens), is_target)

    def _find_answer(
        self, text: str, messages: Messages, number: int, add_generation_prompt: bool
    ) -> tuple[int, int]:
        """Return where an assistant's message begins and ends in a rendered conversation.

        The conversation is rendered again with another content of this message. The two texts are
        equal before and after the content. A message begins where the generation prompt ends,
        because a net has to write what the template puts after it, and it ends after its end token.

        Args:
            text: Rendered conversation.
            messages: Messages of the conversation, without control tokens.
            number: Index of the message.
            add_generation_prompt: Whether `text` ends with a generation prompt.

        Returns:
            Positions in `text` of the first character of the message and of the character after it.

        Raises:
            DataError: If the template refuses the messages with the other content.
        """
        probed = [*messages[:number], {**messages[number], "content": PROBE}]
        other = self._render([*probed, *messages[number + 1 :]], add_generation_prompt)
        begin = _common_length(text, other)
        end = len(text) - _common_length(text[begin:][::-1], other[begin:][::-1])
        # The template may refuse a conversation that begins with an answer.
        with suppress(DataError):
            asked = self._render(messages[:number], True)
            begin = min(begin, len(asked)) if text.startswith(asked) else begin
        # Calls of tools may stand between the content and the end token.
        ending = _search(self._frame_control, text, end)
        if ending is not None and ending[0] == self.end_token:
            end = ending.end()
        return begin, end

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the text that the chat template makes of messages.

        Args:
            messages: Messages of a conversation.
            add_generation_prompt: Whether the text ends with the beginning of an answer.

        Raises:
            DataError: If the template refuses the messages.
        """
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**self._values, **values)
        except Exception as error:  # a template may call anything that its messages do not have
            raise DataError(f"the chat template refuses these messages: {error}") from None

    def _without_control(self, value: Any, control: Sequence[str]) -> Any:
        """Return a message with a mark, BREAK, inside the name of each control token in its texts.

        The text is later cut at each mark, so that the names are encoded as plain text.

        Args:
            value: Message, or a value in it.
            control: Names of the control tokens.
        """
        if isinstance(value, Mapping):
            return {key: self._without_control(item, control) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_control(item, control) for item in value]
        if not isinstance(value, str):
            return value
        value = value.replace(BREAK, "").replace(PROBE, "")
        pattern = "|".join(map(re.escape, control))
        return re.sub(pattern, lambda name: name[0][0] + BREAK + name[0][1:], value)


def _search(names: Sequence[str], text: str, start: int) -> re.Match[str] | None:
    """Return the match of the name that comes first in a text from a position on, or None."""
    return re.compile("|".join(map(re.escape, names))).search(text, start) if names else None


def _common_length(first: str, second: str) -> int:
    """Return the number of equal characters with which two texts begin."""
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])


def chatml_for(tokenizer: Tokenizer) -> str:
    """Return the ChatML template, with the token by which this tokenizer can end a message.

    The token is `<|im_end|>`, or the tokenizer's own end token if it has no `<|im_end|>`.

    Args:
        tokenizer: Tokenizer without a chat template.

    Raises:
        DataError: If the tokenizer has neither token.
    """
    end = IM_END if tokenizer.token_to_id(IM_END) is not None else tokenizer.end_token
    if end is None:
        hint = "a tokenizer with a special token <|im_end|>, or an eos_token in its config"
        raise DataError(f"the tokenizer has no token to end a message with; try: {hint}")
    return CHATML.replace(IM_END, end)


def _compile(template: str) -> Any:
    """Compile a Jinja template with the functions that transformers gives to a chat template.

    Args:
        template: Text of the template.

    Raises:
        DataError: If the template is not valid.
    """
    from jinja2 import TemplateError  # a requirement of torch; imported only for a conversation
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class Generation(Extension):
        """Reads {% generation %}, by which transformers marks the answers, as its content."""

        tags = {"generation"}  # noqa: RUF012 - Extension declares an instance attribute

        def parse(self, parser: Any) -> Any:
            """Return the nodes up to {% endgeneration %}."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise DataError(f"the chat template is not valid: {error}") from None
