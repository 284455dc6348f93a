"""Files of an export: the weights, their config and the tokenizer.

The weights and the config files appear under their names only when they are complete.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gptrain.assemble.companion_files import GENERATION, ID_KEYS, TOKENIZER, read_ends, read_ids
from gptrain.checkpoints import fileops
from gptrain.checkpoints.status import to_json
from gptrain.core.errors import ConfigError
from gptrain.core.small_files import read_facts
from gptrain.data.tokenizers import COMPANIONS, CONFIG_NAME, Tokenizer, copy_files
from gptrain.parallel.requirements import tied_names

FORMATS = {  # method of the net that a format needs, file of the weights, file of the config
    "safetensors": ("", "model.safetensors", ""),
    "hf": ("to_hugging_face", "model.safetensors", "config.json"),
    "peft": ("to_peft", "adapter_model.safetensors", "adapter_config.json"),
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # name in the config -> name in torch


def check_format(net: nn.Module, format: str) -> None:
    """Check that a net can be exported in a format.

    Args:
        net: Net to export. `hf` needs its method `to_hugging_face`, `peft` its method `to_peft`.
        format: safetensors, hf or peft.

    Raises:
        ConfigError: If the net does not have the method.
    """
    method = FORMATS[format][0]
    if method and not hasattr(net, method):
        message = f"{type(net).__name__} has no `{method}` (see gptrain.models)"
        raise ConfigError.of("format", format, message, hint="format=safetensors")


def write_net(net: nn.Module, folder: Path, format: str, dtype: str) -> int:
    """Write the weights, and for hf and peft also a config; return the bytes of the weights.

    Args:
        net: Net to export.
        folder: Existing folder to write to.
        format: safetensors keeps the parameter names of the net. hf uses those of transformers,
            peft the names of adapters in peft.
        dtype: Type of the weights: fp32 or bf16.

    Raises:
        OSError: If a file cannot be written.
        ModuleNotFoundError: If the package `safetensors` is missing.
    """
    method, file, config = FORMATS[format]
    if method:
        content, tensors = getattr(net, method)()
        content |= {"dtype": DTYPES[dtype]} if format == "hf" else {}
        fileops.replace(folder / config, to_json(content))
    else:
        ties = tied_names(net)
        tensors = {name: tensor for name, tensor in net.state_dict().items() if name not in ties}
    return write_tensors(folder / file, tensors, getattr(torch, DTYPES[dtype]))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Write a safetensors file and return the bytes of its tensors.

    Args:
        path: File to write. An existing file is replaced when the new file is complete.
        tensors: Tensors by name.
        dtype: Type to which floating point tensors are converted.

    Raises:
        OSError: If the file cannot be written.
        ModuleNotFoundError: If the package `safetensors` is missing.
    """
    from safetensors import SafetensorError  # optional package
    from safetensors.torch import save_file

    converted = {
        name: (t.detach().to(dtype) if t.is_floating_point() else t.detach()).contiguous()
        for name, t in tensors.items()
    }
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(converted, part, metadata={"format": "pt"})  # transformers requires this entry
        os.replace(part, path)
    except SafetensorError as error:  # raised for a full disk, for example
        raise OSError(errno.EIO, str(error), str(path)) from None
    finally:
        part.unlink(missing_ok=True)
    return sum(tensor.nbytes for tensor in converted.values())


def write_tokenizer(tokenizer: Tokenizer, folder: Path, format: str) -> None:
    """Write the tokenizer of a run and its companions to the folder of an export.

    Args:
        tokenizer: Tokenizer of the run.
        folder: Existing folder to write to.
        format: hf writes a tokenizer_config.json with the special tokens, as transformers needs it.

    Raises:
        OSError: If a file cannot be written.
    """
    tokenizer.save(folder)
    if format == "hf":
        content = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
        fileops.replace(folder / CONFIG_NAME, to_json(content | read_facts(folder / CONFIG_NAME)))


def copy_companion_files(run: Path, folder: Path) -> None:
    """Copy the tokenizer's files, the chat template and the generation config of a run.

    Files that the run does not have are left out. Files of these names in `folder` are replaced.

    Args:
        run: Run folder.
        folder: Existing folder to copy to.

    Raises:
        OSError: If a file cannot be read or written.
    """
    copy_files(run, folder, (*TOKENIZER, *COMPANIONS, GENERATION))


def write_special_ids(folder: Path, tokenizer: Tokenizer | None) -> None:
    """Write the ids of the special tokens to config.json and generation_config.json.

    transformers reads the ids from these two files. Ids in a generation_config.json that was copied
    from the run take precedence over those of the tokenizer, except ids that are not below
    `vocab_size` of config.json. The end token of the tokenizer is added to the end tokens. Does
    nothing if there are no ids and no generation_config.json.

    Args:
        folder: Folder with a config.json and, possibly, a generation_config.json.
        tokenizer: Tokenizer of the run, or None.

    Raises:
        OSError: If a file cannot be written.
    """
    content = read_facts(folder / "config.json")
    generation = read_facts(folder / GENERATION)
    ids: dict[str, Any] = dict(tokenizer.special_ids()) if tokenizer else {}
    ids |= read_ids(generation, content.get("vocab_size"))
    if tokenizer is not None and tokenizer.end_id is not None:
        ends = dict.fromkeys([*read_ends(ids), tokenizer.end_id])
        ids["eos_token_id"] = [*ends] if len(ends) > 1 else tokenizer.end_id
    if ids or generation:
        rest = {key: value for key, value in generation.items() if key not in ID_KEYS}
        fileops.replace(folder / GENERATION, to_json(rest | ids))
        fileops.replace(folder / "config.json", to_json(content | ids))
