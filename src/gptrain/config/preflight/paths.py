"""Check the run folder, and the data files and checkpoints that a config names."""

import glob
import os
from collections.abc import Iterator

from gptrain.config.check import CheckedConfig
from gptrain.core.data_schema import DATA, DataConfig, DataModuleConfig, MixtureConfig, PartConfig
from gptrain.core.errors import BAD_DATA, FOLDER_UNUSABLE, INPUT_NOT_FOUND, ConfigIssue, first_line
from gptrain.core.locations import expand_home
from gptrain.core.schema import RunConfig

NOT_FILES = {"ckpt_path": ("last", "best"), "tokenizer": ("bytes", "bpe")}
DATA_FILES = ("path", "train_path", "val_path", "tokenizer")


def check_folder(checked: CheckedConfig, name: str) -> Iterator[ConfigIssue]:
    """Yield a problem if the run folder cannot be made or written, or holds a finished run.

    A finished run is a problem only for a training that does not resume (`ckpt_path` is null). A
    name with `${` is a problem, because Hydra would resolve it. Nothing is written, and at most one
    problem is yielded.

    Args:
        checked: Config whose values were found valid.
        name: Path of the run folder.
    """
    folder = expand_home(name).absolute()
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    trains = checked.run.task == "fit" and checked.schema is RunConfig and not checked.run.ckpt_path
    message, hint = "", "run_dir=<folder>"
    if "${" in name:  # Hydra would take the name for a reference
        message = "contains ${"
    elif not parent.is_dir():
        message = f"cannot write ({parent} is a file)"
    elif not os.access(parent, os.W_OK | os.X_OK):
        message = f"cannot write (no permission in {parent})"
    elif trains and (folder / "result.json").exists():
        message, hint = "already holds a finished run", "ckpt_path=last, or another run_dir"
    if message:
        yield ConfigIssue("run_dir", name, message, hint=hint, code=FOLDER_UNUSABLE)


def check_files(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem for each data file and checkpoint of the config that is missing or empty.

    Data files are checked for the data groups that ship with gptrain, and only for a training run
    or an evaluation: a command with a schema of its own does not read them. A glob pattern of a
    data key must match a file. A mirror with a URL scheme for which no fsspec package is installed
    is a problem, too.
    """
    run = checked.run
    groups: dict[str, DataConfig | PartConfig] = {"data": run.data}
    if isinstance(run.data, MixtureConfig):
        groups |= {f"data.parts.{name}": part for name, part in (run.data.parts or {}).items()}
    named = {"ckpt_path": run.ckpt_path, "init_from": run.init_from}
    for group, section in groups.items():
        is_shipped = not isinstance(section, DataModuleConfig) and section.train.target in DATA
        if checked.schema is RunConfig and is_shipped:
            given = section.plain()
            named |= {f"{group}.{name}": given.get(name) for name in DATA_FILES}
    if mirror := checked.run.checkpoint.mirror:
        from fsspec import get_filesystem_class  # imported late, because it takes 0.2 s
        from fsspec.core import split_protocol

        try:
            get_filesystem_class(split_protocol(mirror)[0])
        except (ValueError, ImportError) as error:  # the message names the package to install
            yield checked.error("checkpoint.mirror", first_line(error))
    for key, paths in named.items():
        for path in paths if isinstance(paths, list) else filter(None, [paths]):
            full_path = os.path.expanduser(path)
            if path in NOT_FILES.get(key.rpartition(".")[2], ()):
                continue
            if os.path.exists(full_path):
                if not os.path.isdir(full_path) and not os.path.getsize(full_path):
                    yield ConfigIssue(key, path, "empty", hint=f"{key}=<file>", code=BAD_DATA)
                continue
            if not (key.startswith("data.") and glob.glob(full_path, recursive=True)):
                hint = "ckpt_path=last" if key == "ckpt_path" else f"{key}=<file or folder>"
                message = "no such file or folder"
                yield ConfigIssue(key, path, message, hint=hint, code=INPUT_NOT_FOUND)
