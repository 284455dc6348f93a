"""The command: which checkpoint is taken, and into which folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gptrain import config
from gptrain import export as package
from gptrain.checkpoints import fileops
from gptrain.config.from_run import typed_again
from gptrain.config.values import walk
from gptrain.core import labels, shell
from gptrain.core.errors import FOLDER_UNUSABLE, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import LocalPath

log = logging.getLogger(__name__)


class ExportRun(RunConfig):
    """A run's keys and the command's own."""

    reads_data = False

    from_run: LocalPath  # ty: ignore[incompatible-mutable-override]  # it is needed
    format: Literal["safetensors", "hf"]
    dtype: Literal["fp32", "bf16"]


DEFAULTS = {"format": "safetensors", "dtype": "fp32"}


def main() -> None:
    """The command line."""
    config.main(export, ExportRun, DEFAULTS, usage=package.__doc__)


def export(cfg: ExportRun) -> None:
    """Writes the net of a run into run_dir.

    Raises: ConfigError: 2 for a net that transformers does not know, 65 or 66 for a checkpoint that
        cannot be taken, 73 where run_dir holds a run.
    """
    from gptrain.assemble.load import build_net, find_tokenizer
    from gptrain.assemble.resume import find_trained  # imported here: it needs torch
    from gptrain.assemble.weights import load_weights, named_source
    from gptrain.export.files import (
        check_format,
        write_around,
        write_net,
        write_special_ids,
        write_tokenizer,
    )

    folder = Path(cfg.run_dir)
    if (folder / ".hydra" / "overrides.yaml").exists():
        message = "holds a run, whose record an export would replace"
        raise ConfigError.of("run_dir", folder, message, code=FOLDER_UNUSABLE)
    net = build_net(cfg.model)
    check_format(net, cfg.format)
    with named_source("from_run", cfg.from_run):
        path, _ = load_weights(net, find_trained(cfg))
        tokenizer = find_tokenizer(Path(cfg.from_run).expanduser())
    n_bytes = write_net(net, folder, cfg.format, cfg.dtype)
    if tokenizer:
        write_tokenizer(tokenizer, folder, cfg.format)
    write_around(Path(cfg.from_run).expanduser(), folder)
    if cfg.format == "hf":
        values = dict(walk(cfg.data.plain()))
        has_end = any(values[key] is True for key in values if key.endswith("end_of_document"))
        write_special_ids(folder, tokenizer, has_end)
    (folder / ".hydra").mkdir(exist_ok=True)  # what gptrain.load makes the net from
    record = OmegaConf.to_yaml({"model": cfg.model.plain()})
    fileops.replace(folder / ".hydra" / "config.yaml", record.encode())
    log.info(labels.line("export", f"{path}, {cfg.dtype}, {n_bytes / 2**20:.1f} MiB"))
    log.info(labels.line("folder", folder))
    words = [shell.override("from_run", cfg.from_run), shell.override("init_from", str(folder))]
    typed = HydraConfig.get().overrides
    words += typed_again([*typed.hydra, *typed.task], cfg.from_run)
    log.info(labels.line("next", shell.train_command(*words)))


if __name__ == "__main__":
    main()
