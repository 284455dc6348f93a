"""Export a trained net: one safetensors file, or a folder that transformers can load.

    python -m gptrain.export from_run=outputs/a
    python -m gptrain.export from_run=outputs/a format=hf dtype=bf16

    from_run   folder of a run
    ckpt_path  best or last checkpoint of the run, or the path of a checkpoint (best)
    format     safetensors: one file with the net's own parameter names
               hf: weights, config and tokenizer as transformers reads them; adapters are merged
               peft: adapters as peft reads them (safetensors)
    dtype      fp32 or bf16 (fp32)
    run_dir    folder of the export

Another run can start from the weights of the first two formats: init_from=<folder of the export>.
"""

from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf

from gptrain import config
from gptrain.checkpoints import files
from gptrain.checkpoints.signature import sign_record
from gptrain.core import labels
from gptrain.core.errors import BAD_DATA, FOLDER_UNUSABLE, ConfigError
from gptrain.core.locations import expand_home
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import LocalPath


class ExportRun(RunConfig):
    """Keys of the command `gptrain.export`: those of a run, and those that its usage lists."""

    from_run: LocalPath  # ty: ignore[incompatible-mutable-override]  # required
    format: Literal["safetensors", "hf", "peft"] = "safetensors"
    dtype: Literal["fp32", "bf16"] = "fp32"


def export(cfg: ExportRun) -> None:
    """Write the net of a run, its tokenizer and a record of its model group to `run_dir`.

    `gptrain.load` builds the net from the record. An export to hf or peft of a net with adapters
    has no record, because it does not hold that net.

    Args:
        cfg: Configuration of the command.

    Raises:
        ConfigError: If the net has no form in transformers or peft (exit code 2), if the checkpoint
            is damaged (65) or missing (66), or if `run_dir` holds a run (73).
        OSError: If a file cannot be read or written.
    """
    # Import torch only now, so that an invalid option is reported without waiting for the import.
    from gptrain.assemble.config_errors import as_config_errors
    from gptrain.assemble.load import build_net, find_tokenizer, find_trained, load_weights
    from gptrain.export.files import write_companions, write_net

    folder = Path(cfg.run_dir)
    record_dir = folder / ".hydra"
    if (record_dir / "overrides.yaml").exists() or record_dir.is_symlink():
        message = "holds a run, whose saved config an export would replace"
        raise ConfigError.of("run_dir", folder, message, code=FOLDER_UNUSABLE)
    net = build_net(cfg.model)
    with as_config_errors(cfg, "from_run", BAD_DATA):
        path = find_trained(cfg)
        load_weights(net, path)
        tokenizer = find_tokenizer(expand_home(cfg.from_run))
    folder.mkdir(parents=True, exist_ok=True)
    n_bytes = write_net(net, folder, cfg.format, cfg.dtype)
    write_companions(tokenizer, expand_home(cfg.from_run), folder, cfg.format)
    if cfg.format == "safetensors" or not hasattr(net, "to_peft"):  # holds what `model` describes
        record_dir.mkdir(exist_ok=True)  # gptrain.load builds the net from config.yaml
        record = OmegaConf.to_yaml({"model": cfg.model.plain()})
        files.replace(record_dir / "config.yaml", record.encode())
        sign_record(folder)
    print(labels.line("export", f"{path}, {cfg.dtype}, {n_bytes / 2**20:.1f} MiB, in {folder}"))


if __name__ == "__main__":
    config.main(export, ExportRun, usage=__doc__)
