"""Conversations as tokens: a Jinja chat template, and the tokens that the assistant writes.

A conversation is a list of messages, each a dict of `role` and `content`, as transformers takes it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gptrain.core.errors import DataError
from gptrain.data.tokenizers import Tokenizer

Messages: TypeAlias = Sequence[Mapping[str, Any]]
CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] \
+ '<|im_end|>' + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_IM_END = "<|im_end|>"


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
    """Renders conversations with a chat template and encodes them with a tokenizer.

    The tokens are those that transformers' `apply_chat_template` makes. As there, the name of a
    control token in the text of a message becomes that token.

    Args:
        template: Jinja template. None takes that of the tokenizer, or if it has none ChatML, with
            the tokenizer's end token in place of `<|im_end|>` if the vocabulary lacks that.

    Attributes:
        template: Jinja template that is used.
        end_id: Id of the token that ends the assistant's messages.

    Raises:
        DataError: If the template is not valid or writes no token that ends an answer, or if there
            is no template and the tokenizer has no token that can end a message.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None):
        self.tokenizer = tokenizer
        end = tokenizer.end_token if tokenizer.core.token_to_id(_IM_END) is None else _IM_END
        self.template = template or tokenizer.chat_template or CHATML.replace(_IM_END, end or "")
        self._template = _compile(self.template)
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        tokens, is_target = self.encode(talk)
        # -1: the template writes no answer.
        self.end_id = next(reversed(tokens[is_target].tolist()), -1)
        if self.end_id not in tokenizer.core.get_added_tokens_decoder():
            message = "the chat template writes no control token at the end of an answer"
            hint = f"a tokenizer with a special token {_IM_END}, or an eos_token in its config"
            raise DataError(f"{message}; try: {hint}")

    def encode(self, messages: Messages) -> EncodedChat:
        """Return the tokens of a conversation, and which of them the assistant writes.

        Args:
            messages: Messages with the keys `role` and `content`, the oldest first.

        Raises:
            DataError: If the template refuses the messages, or if it renders an earlier message in
                another way when others follow.
        """
        text = self._render(messages, False)
        tokens, starts = self.tokenizer.encode_special(text)  # (N,) each
        following = np.append(starts[1:], len(text))
        is_target = np.zeros(len(tokens), dtype=bool)
        # The assistant writes what the text through a message adds to the text in front of it. If
        # a later message rewrote earlier ones, the net would learn a text that it never reads.
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render(messages[:number], True)
                through = self._render(messages[: number + 1], False).rstrip()
                if not (text.startswith(through) and through.startswith(before)):
                    raise DataError(f"the chat template rewrites message {number + 1} later")
                # A token may begin with the white space before the answer.
                begins = (starts >= len(before)) | (following > len(before))
                is_target |= begins & (starts < len(through))
        return EncodedChat(tokens, is_target)

    def encode_prompt(self, messages: Messages) -> list[int]:
        """Return the tokens of a conversation after which the assistant writes its next message.

        They end with the template's beginning of an answer. Raises a DataError if the template
        refuses the messages.
        """
        return self.tokenizer.encode(self._render(messages, True), special=True).tolist()

    def _render(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Return the text of messages, with the beginning of an answer if it is asked for."""
        flags = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        try:
            return self._template.render(self.tokenizer.special_tokens, messages=messages, **flags)
        except Exception as error:  # a template may call anything that its messages do not have
            raise DataError(f"the chat template refuses these messages: {error}") from None


def _compile(template: str) -> Any:
    """Compile a Jinja template with the functions that transformers gives to a chat template."""
    from jinja2 import TemplateError, ext  # required by torch; imported only for a conversation
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment: Any = ImmutableSandboxedEnvironment(extensions=[ext.loopcontrols], **options)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    # {% generation %}, by which transformers marks the answers, is a scope without an effect.
    template = re.sub(r"(\{%[-+]?\s*(end)?)generation\b", r"\1with", template)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise DataError(f"the chat template is not valid: {error}") from None
