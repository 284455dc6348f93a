"""Implements `from_run=<folder>`: the overrides of an earlier run, followed by those typed now.

python train.py from_run=outputs/a task=test            evaluates the run's best checkpoint
python train.py from_run=outputs/a optimizer.lr=1e-3    trains again with another learning rate

A run that this user started on this machine is trusted: its record is signed, and its overrides
count as if they were typed again. Any other folder is untrusted, and its overrides are refused
unless they are mere data:

- A `_target_` is a class that a yaml file of the project uses in the same group, a class in
  LIBRARY_CLASSES, or a class of a package in `allowed_targets`. It gets keyword arguments only. The
  rule compares names, so nothing is imported.
- A value contains at most one reference to another key.
- No value sets a folder or a file to write to, or reads a file outside of the project.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gptrain.checkpoints.signature import read_signed_record
from gptrain.config.compose import compose_and_explain
from gptrain.config.outside import allowed_roots, find_outside
from gptrain.config.overrides import line_of, parse
from gptrain.config.values import walk
from gptrain.core import locations
from gptrain.core.errors import BAD_DATA, INPUT_NOT_FOUND, ConfigError, ConfigIssue, show
from gptrain.core.shell import command
from gptrain.core.small_files import UnreadableFileError, read_yaml

# Groups and keys that are never taken from an earlier run: where it wrote files, from where it was
# resumed, and which packages it was allowed to use.
NOT_TAKEN = {
    "run_dir", "output_dir", "logger", "profiler", "hydra", "ckpt_path", "allow_changes",
    "from_run", "allowed_targets",
}  # fmt: skip
# Keys of files and folders that are written. A file name may also lead to another folder:
# ModelCheckpoint formats it with numbers, and "{step:c}" becomes any character, such as a slash.
WRITTEN = {
    "cache_dir", "default_root_dir", "dirpath", "exclude_batches_path", "mirror", "save_dir",
}  # fmt: skip
FILE_NAME = r"[\w={}-]*"
# Keys by which a user permits classes and adds folders of config groups (also by --config-dir).
PERMISSIONS = ("allowed_targets", "hydra.searchpath")
NOT_GROUPS = ("name", "init_from")  # keys without a dot that are not config groups
NO_PATHS = ("name", "pattern")  # last parts of keys whose values are never opened as files
UNTRUSTED = "not started by you on this machine"
NO_CHOICE = r"\.\.|://|\$|(^|[\[,'\" ])/"  # parts of a choice that is not a file in conf/
# Pattern of the classes of each group that neither download nor open what their arguments name.
LIBRARY_CLASSES = {
    "optimizer": r"torch\.optim\.[A-Z]\w*",
    "scheduler": r"torch\.optim\.lr_scheduler\.[A-Z]\w*",
    "callbacks": r"(lightning\.pytorch|pytorch_lightning)\.callbacks\.[A-Z]\w*",
    "metrics": r"torchmetrics\.((aggregation|classification|regression)\.)?[A-Z]\w*"
    r"|torchmetrics\.text\.Perplexity",
}
# Several references, or one next to a brace, could form a reference to a resolver. A resolver can
# create objects.
PLAIN = r"[^$]*|[^${]*\$\{\.*\w[\w.]*\}[^${]*"


def expand(typed: list[str], reads_data: bool = True) -> list[str]:
    """Return the overrides of the run in `from_run`, followed by the typed overrides.

    Returns `typed` unchanged if it has no `from_run`, or one whose value is not a text. A typed key
    replaces the run's override of the same key, and a typed `~key` removes it. Overrides that
    belong to the earlier run alone, such as its folder, are left out (see `is_left_out`). If this
    user did not start the run on this machine, its overrides may only set plain values, and name
    classes that the project or the user allows.

    Args:
        typed: Overrides of the command line.
        reads_data: Whether the command reads datasets. If not, the data of the run may be outside
            of the project.

    Raises:
        ConfigError: If the run cannot be read, if `from_run` has several values, as in a sweep, or
            if some overrides of the run are refused. It has a problem for each of them.
    """
    typed_overrides, _ = parse(typed)
    sources = [override for override in typed_overrides if override.key_or_group == "from_run"]
    if any(source.is_sweep_override() for source in sources):
        value = line_of(sources[0]).partition("=")[2]
        raise ConfigError.of("from_run", value, "several runs; all jobs of a sweep share one run")
    if not sources or not isinstance(folder := sources[-1].value(), str):
        return typed
    typed_keys = {override.key_or_group for override in typed_overrides}
    signed = read_signed_record(locations.expand_home(folder))
    saved = [
        override
        for override in read_overrides(folder, signed)
        if not is_left_out(override) or (signed and is_permission(override))
    ]
    kept = [override for override in saved if override.key_or_group not in typed_keys]
    is_trusted = signed is not None
    if problems := list(_find_refused(kept, typed_overrides, folder, is_trusted, reads_data)):
        raise ConfigError(problems)
    # A typed `~key` that removed an override of the run is done. Hydra applies every other `~key`.
    saved_keys = {override.key_or_group for override in saved if not override.is_delete()}
    deletions = (override for override in typed_overrides if override.is_delete())
    done = {line_of(deletion) for deletion in deletions if deletion.key_or_group in saved_keys}
    return [*map(line_of, kept), *(line for line in typed if line not in done)]


def words_to_repeat(words: Sequence[str], run_dir: str | Path) -> list[str]:
    """Return the overrides of a run that a command with `from_run=<run_dir>` has to repeat.

    There are none for a trusted run, which this user started on this machine. For any other run
    they are the permissions (allowed packages and folders of config groups) and the values that
    read files outside of the project.

    Args:
        words: Overrides with which the run was started.
        run_dir: Folder of the run.
    """
    if read_signed_record(locations.expand_home(run_dir)):
        return []
    overrides, _ = parse(list(words))
    repeated = [override for override in overrides if is_permission(override)]
    taken = [override for override in overrides if not is_left_out(override)]
    repeated += [override for override, _ in find_outside_values(taken, run_dir)]
    return list(dict.fromkeys(map(line_of, repeated)))


def read_overrides(run_dir: str, signed: Mapping[str, bytes] | None = None) -> list[Override]:
    """Return the overrides with which a run was started.

    Args:
        run_dir: Folder of the run.
        signed: Verified content of the run's record files, by file name, or None for an untrusted
            run. The record also has the overrides of Hydra's own node, such as its search path.

    Raises:
        ConfigError: If the folder has no run (exit code 66), or its files cannot be read (65).
    """
    file = locations.expand_home(run_dir) / ".hydra" / "overrides.yaml"
    try:
        if signed is None:
            lines = read_yaml(file)
        else:
            hydra_lines = yaml.safe_load(signed["hydra.yaml"])["hydra"]["overrides"]["hydra"]
            lines = [*hydra_lines, *yaml.safe_load(signed[file.name])]
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UnreadableFileError(file, "not a list of overrides")
        parsed, problems = parse(lines)
        if problems:
            raise UnreadableFileError(file, str(problems[0]))
    except (FileNotFoundError, NotADirectoryError):
        message = f"no run in this folder, {file} is missing"
        raise ConfigError.of("from_run", run_dir, message, code=INPUT_NOT_FOUND) from None
    except (UnreadableFileError, OSError) as error:
        raise ConfigError.of("from_run", run_dir, str(error), code=BAD_DATA) from None
    return parsed


def check_values(
    values: dict[str, Any],
    allowed: Sequence[str] = (),
    folders: Iterable[str] = (),
) -> Iterator[ConfigIssue]:
    """Yield a problem for each value that may not be taken from an untrusted run.

    A run is untrusted if this user did not start it on this machine. Refused values are classes
    that are not allowed, keys of Hydra such as `_args_`, keys that set where files are written, and
    references that could run code.

    Args:
        values: Values by dotted key, with references that are not resolved.
        allowed: Packages whose classes the user allows.
        folders: Additional folders of yaml files whose classes are allowed.

    Raises:
        OSError: If a yaml file of the project cannot be read.
    """
    trusted = named_targets([*find_folders(), *folders])
    nodes = (pair for key, node in values.items() for pair in walk(node, key))
    for place, value in nodes:
        key = place.rpartition(".")[2]
        if key == "_target_":
            if not _is_allowed(place, value, allowed, trusted):
                package = show(value).split(".")[0]
                allowed_targets = command(f"allowed_targets=[{package}]")
                hint = f"{allowed_targets}, if you trust its code"
                message = "a class that an untrusted run may not use"
                yield ConfigIssue(place, show(value), message, hint=hint)
        elif key.startswith("_"):
            message = "an untrusted run may only set keyword arguments"
            yield ConfigIssue(place, show(value), message)
        elif key in WRITTEN or (key == "filename" and not re.fullmatch(FILE_NAME, str(value))):
            message = "an untrusted run may not choose where files are written"
            yield ConfigIssue(place, show(value), message)
        elif isinstance(value, str) and not re.fullmatch(PLAIN, value, re.DOTALL):
            message = "an untrusted run may only use a single reference to a key"
            yield ConfigIssue(place, value, message)


def named_targets(folders: Iterable[str | Path]) -> set[tuple[str, str]]:
    """Return the pairs (group, `_target_`) in all yaml files below these folders.

    A file that is not valid YAML, and a folder that does not exist, are skipped.

    Args:
        folders: Folders with a folder for each config group, such as conf/.

    Raises:
        OSError: If a file cannot be read.
    """
    pairs = set()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
    for folder in map(Path, folders):
        for file in folder.rglob("*.yaml"):
            text = file.read_text(errors="replace")
            group = ".".join(file.relative_to(folder).parts[:-1])
            top = "" if "@package _global_" in text else group
            with suppress(yaml.YAMLError):
                for place, value in walk(yaml.load(text, loader), top):
                    if place.endswith("_target_"):
                        pairs.add((_group_of(place), str(value)))
    return pairs


def find_folders() -> list[str | Path]:
    """Return the folders of the user's own yaml files, followed by that of the library.

    The user's folders are those from which Hydra composed the config, including `--config-dir`, or
    conf/ of the project if Hydra does not run.
    """
    with suppress(ValueError, AttributeError):  # Hydra does not run in this process
        sources = HydraConfig.get().runtime.config_sources
        if folders := [source.path for source in sources if source.schema == "file"]:
            return [*folders, locations.LIBRARY / "conf"]
    return [*filter(None, [locations.find_conf()]), locations.LIBRARY / "conf"]


def _group_of(place: str) -> str:
    """Return the config group that a dotted key comes from.

    It is the first part of the key. A key that begins with `module.metrics.` comes from the group
    `metrics`.

    Args:
        place: Dotted key, such as `optimizer.lr`.
    """
    return "metrics" if place.startswith("module.metrics.") else place.partition(".")[0]


def _is_allowed(
    place: str, target: Any, allowed: Sequence[str], trusted: set[tuple[str, str]]
) -> bool:
    """Return whether an untrusted run may use a class at a place of the config.

    Args:
        place: Dotted key of the `_target_`.
        target: Dotted name of the class. Any value but a string is refused.
        allowed: Packages whose classes the user allows.
        trusted: Pairs (group, `_target_`) of the yaml files of the user and of the library.
    """
    group = _group_of(place)
    pattern = LIBRARY_CLASSES.get(group)
    return isinstance(target, str) and (
        (group, target) in trusted
        or bool(pattern and re.fullmatch(pattern, target))
        or any(f"{target}.".startswith(f"{package}.") for package in allowed)
    )


def is_left_out(override: Override) -> bool:
    """Return whether `from_run` never takes over an override from the earlier run.

    Such overrides set where files are written, the checkpoint to start from, loggers, or the
    permissions of the user: the groups and keys in NOT_TAKEN and WRITTEN.
    """
    names = (override.key_or_group, override.package or "")
    parts = [name.replace("/", ".").split(".") for name in names]
    return any(part[0] in NOT_TAKEN or part[-1] in WRITTEN for part in parts)


def is_permission(override: Override) -> bool:
    """Return whether an override sets `allowed_targets` or `hydra.searchpath`.

    With these keys a user permits classes of other packages, and adds folders of config groups.
    """
    return override.key_or_group in PERMISSIONS


def _find_refused(
    kept: list[Override],
    typed: list[Override],
    run_dir: str,
    is_trusted: bool,
    reads_data: bool,
) -> Iterator[ConfigIssue]:
    """Yield a problem for each override of a run that is refused, under the key `from_run`.

    An override is refused if it does not fit the config any more. One of an untrusted run is also
    refused if it names a class that is not allowed, sets where files are written, or reads a file
    outside of the project.

    Args:
        kept: Overrides of the run that were not replaced by typed ones.
        typed: Overrides of the command line.
        run_dir: Folder of the run.
        is_trusted: Whether this user started the run on this machine.
        reads_data: Whether the command reads datasets.
    """
    # Choices are checked before anything is composed, so that no file outside of conf/ is read.
    problems = [] if is_trusted else list(_find_foreign_choices(kept))
    prefix = f"{UNTRUSTED}: "
    if not problems:
        # A typed choice such as callbacks=[ema,scores] replaces that of the run.
        context = [line_of(item) for item in typed if is_choice(item) or is_permission(item)]
        cfg, unfit = compose_and_explain([*context, *map(line_of, kept)])
        keys = {override.key_or_group for override in kept}
        unfit = [problem for problem in unfit if problem.key in keys]
        if unfit or is_trusted:
            problems = unfit
            prefix = ""
        else:
            problems = list(_find_untrusted(kept, cfg, run_dir, reads_data))
    for problem in problems:
        message = f"{prefix}was started with {problem.key}={problem.value}: {problem.message}"
        hint = problem.hint.removeprefix("--help") or command(f"~{problem.key}")
        yield ConfigIssue("from_run", run_dir, message, hint=hint)


def _find_foreign_choices(overrides: Iterable[Override]) -> Iterator[ConfigIssue]:
    """Yield a problem for each choice of an untrusted run that could be a file outside of conf/.

    This is so for a choice of a config group (see `is_choice`) that is an absolute path, or
    contains `..`, `://` or a reference with `$`.
    """
    for override in overrides:
        value = line_of(override).partition("=")[2]
        if is_choice(override) and re.search(NO_CHOICE, value):
            yield ConfigIssue(override.key_or_group, value, "not a choice of conf/")


def _find_untrusted(
    kept: list[Override], cfg: DictConfig, run_dir: str, reads_data: bool
) -> Iterator[ConfigIssue]:
    """Yield a problem for each value that may not be taken from an untrusted run.

    Files outside of the project are reported only if no other value is refused.

    Args:
        kept: Overrides of the run.
        cfg: Config that the overrides compose.
        run_dir: Folder of the run.
        reads_data: Whether the command reads datasets. If not, the data may be outside the project.
    """
    values = {
        override.key_or_group: override.value() for override in kept if not override.is_delete()
    }
    folders = [path.removeprefix("file://") for path in cfg.hydra.searchpath]
    problems = list(check_values(values, cfg.allowed_targets, folders))
    yield from problems
    if problems:
        return
    for override, reason in find_outside_values(kept, run_dir, cfg):
        key = override.key_or_group
        if reads_data or not key.startswith("data."):
            value = line_of(override).partition("=")[2]
            message = f"{reason}: repeat the override to allow it"
            yield ConfigIssue(key, value, message, hint=command(line_of(override)))


def is_choice(override: Override) -> bool:
    """Return whether an override such as `model=gpt2` may select a file of a config group.

    Every key without a dot, other than `name` and `init_from`, counts as a config group.
    """
    return "." not in override.key_or_group and override.key_or_group not in NOT_GROUPS


def find_outside_values(
    overrides: Iterable[Override], run_dir: str | Path, cfg: DictConfig | None = None
) -> Iterator[tuple[Override, str]]:
    """Yield each override that reads a file outside of the project and the run, and the reason.

    Args:
        overrides: Overrides of the run.
        run_dir: Folder of the run. Its parent folder counts as inside.
        cfg: Composed config, in which the references of the values are resolved. Without it only
            the typed values are checked.
    """
    roots = allowed_roots(run_dir)
    for override in overrides:
        reasons = (find_outside(text, roots) for text in _texts_of(override, cfg))
        if reason := next(filter(None, reasons), None):
            yield override, reason


def _texts_of(override: Override, cfg: DictConfig | None) -> Iterator[str]:
    """Yield the strings of an override's value that may be paths, as typed and as resolved.

    Args:
        override: Override of the run. `~key`, and a choice of a config group by its name, yield
            nothing.
        cfg: Composed config in which references are resolved, or None.
    """
    if override.is_delete() or (is_choice(override) and not isinstance(override.value(), dict)):
        return
    values = [override.value()]
    if cfg is not None:
        with suppress(OmegaConfBaseException):
            node = OmegaConf.select(cfg, override.key_or_group)
            is_node = OmegaConf.is_config(node)
            values.append(OmegaConf.to_container(node, resolve=True) if is_node else node)
    for place, text in (pair for value in values for pair in walk(value, override.key_or_group)):
        if isinstance(text, str) and place.rpartition(".")[2] not in NO_PATHS:
            yield text
