"""Conversations as tokens: those of transformers, and which of them the assistant writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gptrain.core.errors import DataError
from gptrain.data import load_tokenizer
from gptrain.text.chat import CHATML, ChatFormat

# The forms of templates that are in use: ChatML with a default system message, [INST] without a
# generation prompt, headers of several tokens, and reasoning that only the last answer keeps: it
# rewrites the answers before.
TEMPLATES = {
    "chatml": CHATML,
    "system": "{% if messages[0].role != 'system' %}<|im_start|>system\n"
    "It is {{ strftime_now('%Y') }}.<|im_end|>\n"
    "{% endif %}" + CHATML,
    "inst": "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ '[INST] ' + message.content.strip() + ' [/INST]' }}{% elif message.role == 'assistant' %}"
    "{% generation %}{{ ' ' + message.content.strip() + eos_token }}{% endgeneration %}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
    "header": "{% for message in messages %}{% break %}{% endfor %}"
    "{% if tools is not none or documents is not none %}{{ raise_exception('no') }}"
    "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '<|im_end|>\n\n' + "
    "message.content | trim + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_end|>\n\n' }}{% endif %}",
    "reasoning": "{%- for message in messages %}\n    {%- set text = message.content %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- set text = text.split('</think>')[-1] %}\n"
    "        {%- if loop.last %}\n            {%- set text = '<think>\n\n</think>\n\n' + text %}\n"
    "        {%- endif %}\n    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\n' + text + '<|im_end|>\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}",
}
ENDS = {"inst": "<|endoftext|>", "header": "<|endoftext|>"}
TALK = [
    {"role": "user", "content": "ab?"},
    {"role": "assistant", "content": " a 你\n"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "ba"},
]
# What the assistant writes in TALK, by template.
ANSWERS = {
    "inst": " a 你<|endoftext|> ba<|endoftext|>",
    "header": "a 你<|endoftext|>ba<|endoftext|>",
    "reasoning": "<think>\n\n</think>\n\n a 你\n<|im_end|>",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tokenizer of transformers: the 256 bytes, a merge, and tokens special and not."""
    byte_level = pre_tokenizers.ByteLevel
    vocab = {name: number for number, name in enumerate(sorted(byte_level.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab | {"ab": 256}, [("a", "b")]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("[INST]")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def named(folder: Path, name: str) -> Path:
    """Write the template to the folder's tokenizer_config.json."""
    special = {"bos_token": "<|endoftext|>", "eos_token": ENDS.get(name, "<|im_end|>")}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATES[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | special))
    return folder


@pytest.mark.engine("transformers")
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_transformers_and_the_targets_those_of_the_assistant(name, folder):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(named(folder, name))
    chat_format = ChatFormat(tokenizer)
    other = AutoTokenizer.from_pretrained(folder)
    talk = TALK[:2] if name == "reasoning" else TALK
    chat = chat_format.encode(talk)
    assert chat.tokens.tolist() == other.apply_chat_template(talk, return_dict=False)
    answers = ANSWERS.get(name, " a 你\n<|im_end|>ba<|im_end|>")
    assert tokenizer.decode(chat.tokens[chat.is_target]) == answers
    assert chat_format.end_id == tokenizer.core.token_to_id(ENDS.get(name, "<|im_end|>"))
    asked = other.apply_chat_template(TALK[:3], add_generation_prompt=True, return_dict=False)
    assert chat_format.encode_prompt(TALK[:3]) == asked


def test_a_call_of_a_tool_is_a_target_without_and_after_a_content(folder):
    template = CHATML.replace(" + '<|im_end|>'", " + message.get('call', '') + '<|im_end|>'")
    chat = ChatFormat(load_tokenizer(folder), template)
    calls = [{"role": "assistant", "content": text, "call": "{f}"} for text in ("", "a")]
    tokens, is_target = chat.encode([TALK[0], calls[0], TALK[2], calls[1], TALK[2]])
    assert chat.tokenizer.decode(tokens[is_target]) == "{f}<|im_end|>a{f}<|im_end|>"
    # A call may be nested. A number stays a number.
    template = template.replace("message.get('call', '')", "message.get('call', '') | tojson")
    chat = ChatFormat(load_tokenizer(folder), template)
    tokens, is_target = chat.encode([TALK[0], calls[0] | {"call": [{"é": ["a", 1]}]}])
    assert chat.tokenizer.decode(tokens[is_target]) == '[{"é": ["a", 1]}]<|im_end|>'
    with pytest.raises(DataError):
        chat.encode(["hi"])


def test_special_tokens_are_encoded_on_request_only(folder):
    for tokenizer in (load_tokenizer(folder), load_tokenizer("bytes")):
        end_id = tokenizer.core.token_to_id("<|im_end|>")
        a, b = tokenizer.core.token_to_id("a"), tokenizer.core.token_to_id("b")
        assert tokenizer.encode("a<|im_end|>b", special=True).tolist() == [a, end_id, b]
        plain = tokenizer.encode("a<|im_end|>b")
        assert end_id not in plain and tokenizer.decode(plain) == "a<|im_end|>b"
        assert tokenizer.core.token_to_id("no such token") is None
