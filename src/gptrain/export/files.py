"""The files of an export: whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptrain.resilience import fileops


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """An indented JSON file."""
    fileops.replace(path, json.dumps(content, indent=2).encode() + b"\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: str) -> int:
    """A safetensors file; floating point numbers in torch's type dtype. Returns its bytes."""
    from safetensors.torch import save_file  # an extra

    own = {
        name: tensor.detach()
        .to(getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in tensors.items()
    }
    part = path.with_name(f".{path.name}.part")
    save_file(own, part, metadata={"format": "pt"})  # transformers asks for this entry
    os.replace(part, path)
    return path.stat().st_size


def byte_level_tokenizer() -> dict[str, Any]:
    """The tokenizer `bytes` as a tokenizer.json: a BPE of 256 bytes that merges nothing.

    Such files write a byte as a printable character: itself where it is one, else the next free
    one from U+0100 on. Source: bytes_to_unicode of openai/gpt-2, encoder.py.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    unused = ("truncation", "padding", "normalizer", "post_processor")
    vocabulary = {characters[byte]: byte for byte in range(256)}
    return {
        "version": "1.0",
        "added_tokens": [],
        **dict.fromkeys(unused),
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
