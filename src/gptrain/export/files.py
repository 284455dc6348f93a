"""Files of an export: the weights, their config and the tokenizer.

The weights and the config files appear under their names only when they are complete.
"""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from gptrain.assemble.companion_files import GENERATION, ID_KEYS, TOKENIZER, read_ends, read_ids
from gptrain.checkpoints import files
from gptrain.core.errors import ConfigError
from gptrain.core.small_files import read_facts
from gptrain.data.tokenizers import COMPANIONS, CONFIG_NAME, Tokenizer, copy_files

_FORMATS = {  # method of the net that a format needs, file of the weights, file of the config
    "hf": ("to_hugging_face", "model.safetensors", "config.json"),
    "peft": ("to_peft", "adapter_model.safetensors", "adapter_config.json"),
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write_net(net: nn.Module, folder: Path, format: str, dtype: str) -> int:
    """Write the weights, and for hf and peft also a config; return the bytes of the weights.

    Files of these names in the folder are replaced. A tensor with several names, such as that of a
    tied head, has the first of them only.

    Args:
        net: Full net on one device.
        folder: Existing folder.
        format: "safetensors", "hf" or "peft", by which the tensors have the names of the net, of
            transformers or of peft.
        dtype: "fp32" or "bf16", for floating point tensors. Other tensors keep their type.

    Raises:
        ConfigError: If the net lacks the method `to_hugging_face` (hf) or `to_peft` (peft).
        OSError: If a file cannot be written.
    """
    file, weights = "model.safetensors", dict(net.named_parameters(remove_duplicate=False))
    # `load_net_state` reads a buffer that modules share under each of its names.
    tensors = {n: t if n in weights else t.clone() for n, t in net.state_dict().items()}
    if format != "safetensors":
        method, file, config = _FORMATS[format]
        if not hasattr(net, method):
            message = f"{type(net).__name__} has no `{method}` (see gptrain.models)"
            raise ConfigError.of("format", format, message, hint="format=safetensors")
        content, tensors = getattr(net, method)()
        content |= {"dtype": str(_DTYPES[dtype]).split(".")[1]} if format == "hf" else {}
        files.replace(folder / config, files.to_json(content))
    # A tensor without values has no address.
    named = reversed(tensors.items())
    first = {(t.data_ptr() or name, t.shape, t.stride()): (name, t) for name, t in named}
    converted = {
        name: t.detach().to(_DTYPES[dtype] if t.is_floating_point() else t.dtype).contiguous()
        for name, t in first.values()
    }
    # transformers requires this entry of the metadata.
    files.replace(folder / file, save(converted, metadata={"format": "pt"}))
    return sum(tensor.nbytes for tensor in converted.values())


def write_companions(tokenizer: Tokenizer | None, run: Path, folder: Path, format: str) -> None:
    """Copy the tokenizer of a run, its chat template and its generation config to an export.

    Files that the run lacks are left out. For hf, special tokens and their ids are also written
    where transformers reads them, and None for an id that is not known or not below `vocab_size`.
    Ids in the generation config of the run win over those of the tokenizer, whose end token is
    added.

    Args:
        tokenizer: Tokenizer of the run, or None.
        run: Run folder.
        folder: Folder of the export. For hf, `write_net` has written its config.json.
        format: "safetensors", "hf" or "peft".

    Raises:
        OSError: If a file cannot be read or written.
    """
    copy_files(run, folder, (*TOKENIZER, *COMPANIONS, GENERATION))
    if format != "hf":
        return
    config, generation = (read_facts(folder / name) for name in ("config.json", GENERATION))
    special = tokenizer.special_ids() if tokenizer else {}
    ids = special | read_ids(generation, config.get("vocab_size"))
    ids |= read_ids({"eos_token_id": [*dict.fromkeys([*read_ends(ids), *read_ends(special)])]})
    if tokenizer:
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
        files.replace(folder / CONFIG_NAME, files.to_json(facts | read_facts(folder / CONFIG_NAME)))
    files.replace(folder / GENERATION, files.to_json(generation | dict.fromkeys(ID_KEYS) | ids))
    # The defaults of transformers are ids of its own tokenizer.
    known = dict.fromkeys(ID_KEYS) | read_ids(config, config.get("vocab_size"))
    files.replace(folder / "config.json", files.to_json(config | known | ids))
