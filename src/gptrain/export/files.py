"""The files of an export: the weights, their config and their tokenizer, each whole or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from gptrain.assemble.companion_files import (
    COMPANIONS,
    GENERATION,
    ID_KEYS,
    TOKENIZER,
    copy_around,
    read_ids,
)
from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import to_json
from gptrain.core.errors import ConfigError
from gptrain.core.small_files import read_facts
from gptrain.data.tokenizers import ByteTokenizer, Tokenizer
from gptrain.parallel.requirements import tied_names

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # torch's names


def check_format(net: nn.Module, form: str) -> None:
    """Raises ConfigError for a net that transformers does not know."""
    if form == "hf" and not hasattr(net, "to_hugging_face"):
        message = f"{type(net).__name__} has no `to_hugging_face` (see gptrain.models)"
        raise ConfigError.of("format", "hf", message, hint="format=safetensors")


def write_net(net: nn.Module, folder: Path, form: str, dtype: str) -> int:
    """Writes model.safetensors, and config.json for transformers; returns the bytes of weights."""
    if form == "hf":
        content, tensors = cast(Any, net).to_hugging_face()
        fileops.replace(folder / "config.json", to_json(content | {"dtype": DTYPES[dtype]}))
    else:
        ties = tied_names(net)
        tensors = {name: tensor for name, tensor in net.state_dict().items() if name not in ties}
    return write_tensors(folder / "model.safetensors", tensors, getattr(torch, DTYPES[dtype]))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """A safetensors file, its floating point numbers in dtype. Returns the bytes of the tensors.

    Raises: OSError.
    """
    from safetensors import SafetensorError  # an extra
    from safetensors.torch import save_file

    own = {
        name: (t.detach().to(dtype) if t.is_floating_point() else t.detach()).contiguous()
        for name, t in tensors.items()
    }
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(own, part, metadata={"format": "pt"})  # transformers asks for this entry
        os.replace(part, path)
    except SafetensorError as error:  # of a full disk, among others
        raise OSError(errno.EIO, str(error), str(path)) from None
    finally:
        part.unlink(missing_ok=True)
    return sum(tensor.nbytes for tensor in own.values())


def write_tokenizer(tokenizer: Tokenizer, folder: Path, form: str) -> None:
    """Write the tokenizer of a run; for `format=hf` as transformers reads it."""
    if form == "safetensors" or not isinstance(tokenizer, ByteTokenizer):
        tokenizer.save(folder)
    else:
        write_byte_level(folder / "tokenizer.json")
    if form == "hf":
        content = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if not isinstance(tokenizer, ByteTokenizer):
            content |= tokenizer.special_tokens
        fileops.replace(folder / "tokenizer_config.json", to_json(content))


def write_around(run: Path, folder: Path) -> None:
    """Copy what lies in a run's folder around its weights. A link there is not followed."""
    names = [name for name in (*TOKENIZER, *COMPANIONS) if not (run / name).is_symlink()]
    if (folder / TOKENIZER[0]).exists():
        names = [name for name in names if name != TOKENIZER[0]]
    copy_around(run, folder, names)


def write_special_ids(folder: Path, tokenizer: Tokenizer | None, has_end: bool) -> None:
    """Write where a text begins and ends into the two files from which transformers knows it.

    The ids in a generation_config.json that came with the weights count before those of the
    tokenizer. The end token of the data is always one of the end tokens.

    Args:
        folder: Folder with a config.json, and with a generation_config.json if there is one.
        has_end: Whether the data have an end token after each document. It matters for `bytes`,
            of which every token may be text.
    """
    content = read_facts(folder / "config.json")
    generation = read_facts(folder / GENERATION)
    ids: dict[str, Any] = dict(tokenizer.special_ids()) if tokenizer else {}
    ids |= read_ids(generation, content.get("vocab_size"))
    is_used = tokenizer is not None and (has_end or not isinstance(tokenizer, ByteTokenizer))
    if is_used and tokenizer.end_id is not None:
        ends = ids.get("eos_token_id", [])
        ends = ends if isinstance(ends, list) else [ends]
        if tokenizer.end_id not in ends:
            ids["eos_token_id"] = [*ends, tokenizer.end_id] if ends else tokenizer.end_id
    if ids or generation:
        rest = {key: value for key, value in generation.items() if key not in ID_KEYS}
        fileops.replace(folder / GENERATION, to_json(rest | ids))
        fileops.replace(folder / "config.json", to_json(content | ids))


def write_byte_level(path: Path) -> None:
    """The tokenizer `bytes` as a tokenizer.json: a BPE of 256 bytes that merges nothing.

    Such files write a byte as a printable character: itself where it is one, else the next free
    one from U+0100 on. Source: bytes_to_unicode of openai/gpt-2, encoder.py.
    """
    import tokenizers  # an extra

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    characters = sorted(byte_level.alphabet())
    themselves = [ord(character) for character in characters if ord(character) < 256]
    others = [byte for byte in range(256) if byte not in themselves]
    vocabulary = dict(zip(characters, [*themselves, *others], strict=True))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path))
