"""The command: which checkpoint is taken, and what is written of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omegaconf import DictConfig, OmegaConf
from torch import nn

from gptrain import config
from gptrain import export as package
from gptrain.config.kinds import LocalPath
from gptrain.config.schema import Run
from gptrain.problems import ConfigError

if TYPE_CHECKING:
    from gptrain.data.tokenizers import Tokenizer

log = logging.getLogger(__name__)


class ExportRun(Run):
    """A run's keys and the command's own."""

    from_run: LocalPath
    format: Literal["safetensors", "hf"]
    dtype: Literal["fp32", "bf16"]


DEFAULTS = {"format": "safetensors", "dtype": "fp32"}


def main() -> None:
    """The command line."""
    config.main(export, ExportRun, DEFAULTS, usage=package.__doc__)


def export(cfg: DictConfig) -> None:
    """Writes the net of a run into run_dir.

    Raises: ConfigError with code 65 or 66 for a checkpoint that cannot be taken.
    """
    from gptrain import launch  # here, so that a wrong option is answered without torch
    from gptrain.assemble.resume import find_trained
    from gptrain.nets.load import build_net, find_tokenizer
    from gptrain.nets.weights import load_weights, named_source

    cfg = launch.settle(cfg)
    net, folder = build_net(cfg), Path(cfg.run_dir)
    with named_source("from_run", cfg.from_run):
        path, _ = load_weights(net, find_trained(cfg))
        tokenizer = find_tokenizer(Path(cfg.from_run).expanduser())
    n_bytes = write_net(net, folder, cfg.format, cfg.dtype)
    write_tokenizer(tokenizer, folder, cfg.format)
    (folder / ".hydra").mkdir(exist_ok=True)  # what gptrain.load makes the net from
    OmegaConf.save(OmegaConf.masked_copy(cfg, ["model"]), folder / ".hydra" / "config.yaml")
    log.info("%-9s %s, %s, %.1f MiB", "export", path, cfg.dtype, n_bytes / 2**20)
    log.info("%-9s %s", "folder", folder)
    log.info("%-9s python train.py init_from=%s", "next", folder)


def write_net(net: nn.Module, folder: Path, form: str, dtype: str) -> int:
    """Writes model.safetensors, and config.json for transformers; returns the bytes of weights.

    Raises: ConfigError for a net that transformers does not know.
    """
    from gptrain.export.files import write_json, write_tensors
    from gptrain.parallel.fit import tied_names

    name = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    if form == "hf":
        if not hasattr(net, "to_hugging_face"):
            wrong = f"{type(net).__name__} has no `to_hugging_face` (see gptrain.models)"
            raise ConfigError.of("format", "hf", wrong, attempt="format=safetensors")
        content, tensors = net.to_hugging_face()
        write_json(folder / "config.json", content | {"dtype": name})
    else:
        ties = tied_names(net)
        tensors = {name: tensor for name, tensor in net.state_dict().items() if name not in ties}
    return write_tensors(folder / "model.safetensors", tensors, name)


def write_tokenizer(tokenizer: Tokenizer | None, folder: Path, form: str) -> None:
    """The tokenizer of the run, as transformers reads it where the weights are for it."""
    from gptrain.export.files import byte_level_tokenizer, write_json

    if tokenizer is None:
        log.info("%-9s none in the run's folder", "tokenizer")
        return
    if form == "hf" and tokenizer.identity == "bytes":
        write_json(folder / "tokenizer.json", byte_level_tokenizer())
    else:
        tokenizer.save(folder)
    if form == "hf":
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
