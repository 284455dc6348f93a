"""The files of an export: the weights, their config and their tokenizer, each whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from gptrain.data.tokenizers import Tokenizer
from gptrain.parallel.fit import tied_names
from gptrain.problems import ConfigError
from gptrain.progress import progress_bar
from gptrain.resilience import fileops
from gptrain.resilience.status import to_json

CODES = {  # of the format
    torch.float32: "F32", torch.bfloat16: "BF16", torch.complex64: "C64", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # torch's names


def check_format(net: nn.Module, form: str) -> None:
    """Raises ConfigError for a net that transformers does not know."""
    if form == "hf" and not hasattr(net, "to_hugging_face"):
        wrong = f"{type(net).__name__} has no `to_hugging_face` (see gptrain.models)"
        raise ConfigError.of("format", "hf", wrong, attempt="format=safetensors")


def write_net(net: nn.Module, folder: Path, form: str, dtype: str) -> int:
    """Writes model.safetensors, and config.json for transformers; returns the bytes of weights."""
    if form == "hf":
        content, tensors = net.to_hugging_face()
        fileops.replace(folder / "config.json", to_json(content | {"dtype": DTYPES[dtype]}))
    else:
        ties = tied_names(net)
        tensors = {name: tensor for name, tensor in net.state_dict().items() if name not in ties}
    return write_tensors(folder / "model.safetensors", tensors, getattr(torch, DTYPES[dtype]))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """A safetensors file, its floating point numbers in dtype. Returns the bytes of the tensors.

    By us: the library holds all converted tensors at once, says nothing until it is done, and
    makes an error of its own of a disk that is full. The length of the header in 8 bytes, the
    header, the tensors. Source: github.com/huggingface/safetensors, README, Format.

    Raises: OSError.
    """
    kinds = {name: dtype if t.is_floating_point() else t.dtype for name, t in tensors.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0  # transformers asks for this entry
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * kinds[name].itemsize
        place = {"shape": [*tensor.shape], "data_offsets": [begin, end]}
        header[name] = {"dtype": CODES[kinds[name]]} | place
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors may be mapped
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of an export that was killed
    with part.open("xb") as file, progress_bar("exporting", end) as bar:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            own = tensor.detach().to(kinds[name]).flatten()
            bar.update(file.write(own.view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    return end


def write_tokenizer(tokenizer: Tokenizer, folder: Path, form: str) -> None:
    """The tokenizer of the run, as transformers reads it where the weights are for it."""
    if form == "safetensors" or tokenizer.identity != "bytes":
        tokenizer.save(folder)
    else:
        write_byte_level(folder / "tokenizer.json")
    if form == "hf":
        content = {"tokenizer_class": "PreTrainedTokenizerFast"}
        fileops.replace(folder / "tokenizer_config.json", to_json(content))


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
