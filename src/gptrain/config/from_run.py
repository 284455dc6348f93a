"""An old run by its folder: the overrides it was started with, then those typed now.

python train.py from_run=outputs/a task=test            its best checkpoint, evaluated
python train.py from_run=outputs/a optimizer.lr=1e-3    the same run with another learning rate

A run that this user started on this machine is obeyed as if its words were typed again: its record
is signed. Any other folder is untrusted, so what it holds is data. A `_target_` may be one that the
project's own conf/ names in that group, a class of torch or Lightning as in LIBRARY_CLASSES, or of
a package in `allowed_targets`; it gets keyword arguments only. It is judged by its name: nothing is
imported. A value refers to one other key at most, says nowhere where to write, and names no file
outside.
"""

from __future__ import annotations

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

# Where the old run lay and wrote, how it went on there, and what it was allowed.
NOT_TAKEN = {
    "run_dir", "output_dir", "logger", "profiler", "hydra", "ckpt_path", "allow_changes",
    "from_run", "allowed_targets",
}  # fmt: skip
# Where to write. A file's name may lead elsewhere, too: ModelCheckpoint joins it to a folder after
# it has put in numbers, of which "{step:c}" makes any character.
WRITTEN = {
    "cache_dir", "default_root_dir", "dirpath", "exclude_batches_path", "mirror", "save_dir",
}  # fmt: skip
FILE_NAME = r"[\w={}-]*"
TYPED = ("allowed_targets", "hydra.searchpath")  # what the user allows, and --config-dir
FREE = ("name", "init_from")  # keys without a dot that are no choices
NO_PATHS = ("name", "pattern")  # last parts of keys whose values are never opened as files
UNTRUSTED = "not started by you on this machine"
NO_CHOICE = r"\.\.|://|\$|(^|[\[,'\" ])/"  # a choice of no file in conf/
# Group -> names of classes that neither fetch nor open what their arguments name.
LIBRARY_CLASSES = {
    "optimizer": r"torch\.optim\.[A-Z]\w*",
    "scheduler": r"torch\.optim\.lr_scheduler\.[A-Z]\w*",
    "callbacks": r"(lightning\.pytorch|pytorch_lightning)\.callbacks\.[A-Z]\w*",
    "metrics": r"torchmetrics\.((aggregation|classification|regression)\.)?[A-Z]\w*"
    r"|torchmetrics\.text\.Perplexity",
}
# Of several references, or of one beside a brace, a text could be made that is a reference again,
# to a resolver that makes objects.
PLAIN = r"[^$]*|[^${]*\$\{\.*\w[\w.]*\}[^${]*"


def expand(typed: list[str], reads_data: bool = True) -> list[str]:
    """The overrides of the run that `from_run` names, where it is typed, before those typed.

    A typed key replaces an old one; a typed `~key` leaves an old override out.

    Args:
        reads_data: False for a command that takes the net alone: data may lie anywhere.
    Raises: ConfigError, naming each old override that is refused.
    """
    now, _ = parse(typed)
    named = [one for one in now if one.key_or_group == "from_run"]
    if any(one.is_sweep_override() for one in named):
        given = line_of(named[0]).partition("=")[2]
        raise ConfigError.of("from_run", given, "several runs; one is taken up, also by a sweep")
    if not named or not isinstance(folder := named[-1].value(), str):
        return typed
    typed_keys = {one.key_or_group for one in now}
    if "ckpt_path" in typed_keys:
        typed_keys.add("init_from")  # it goes on, past its beginning
    signed = read_signed_record(Path(folder).expanduser())
    saved = read_overrides(folder, signed)
    saved = [one for one in saved if not is_left_out(one) or (signed and is_permission(one))]
    kept = [one for one in saved if one.key_or_group not in typed_keys]
    if problems := list(_find_refused(kept, now, folder, signed is not None, reads_data)):
        raise ConfigError(problems)
    # A `~key` has done its work where it left an old override out; else it is Hydra's to obey.
    added = {one.key_or_group for one in saved if not one.is_delete()}
    obeyed = {line_of(one) for one in now if one.is_delete() and one.key_or_group in added}
    return [*(line_of(one) for one in kept), *(line for line in typed if line not in obeyed)]


def typed_again(words: Sequence[str], run_dir: str | Path) -> list[str]:
    """Return those of a run's overrides that a command with `from_run=run_dir` has to repeat.

    The folder of a run that this user started brings all of them. Of another run it does not bring
    folders in which choices are looked up, packages whose classes are allowed, and files outside of
    the project.
    """
    if read_signed_record(run_dir):
        return []
    typed, _ = parse(list(words))
    again = [one for one in typed if is_permission(one)]
    again += [
        one for one, _ in named_outside((one for one in typed if not is_left_out(one)), run_dir)
    ]
    return list(dict.fromkeys(map(line_of, again)))


def read_overrides(run_dir: str, signed: Mapping[str, bytes] | None = None) -> list[Override]:
    """Return what was typed to start a run.

    Args:
        signed: Verified content of the run's records. They also have the folders in which the run
            looked up its choices.

    Raises:
        ConfigError: With code 66 if there is no run in that folder, 65 if it cannot be read.
    """
    file = Path(run_dir).expanduser() / ".hydra" / "overrides.yaml"
    try:
        if signed is None:
            lines = read_yaml(file)
        else:
            of_hydra = yaml.safe_load(signed["hydra.yaml"])["hydra"]["overrides"]["hydra"]
            lines = [*of_hydra, *yaml.safe_load(signed[file.name])]
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
    """What somebody else's values may not say.

    Args:
        values: by dotted key, nothing resolved.   allowed: packages that the user trusts.
        folders: of one's own yaml files, besides those that Hydra composed of, or else conf/.
    """
    named = named_targets([*find_folders(), *folders])
    for place, value in (one for key, node in values.items() for one in walk(node, key)):
        key = place.rpartition(".")[2]
        if key == "_target_":
            if not _is_taken(place, value, allowed, named):
                package = show(value).split(".")[0]
                allowed_targets = command(f"allowed_targets=[{package}]")
                hint = f"{allowed_targets}, if you trust its code"
                message = "somebody else's run may not name it"
                yield ConfigIssue(place, show(value), message, hint=hint)
        elif key.startswith("_"):
            yield ConfigIssue(place, show(value), "of somebody else's run only keywords are taken")
        elif key in WRITTEN or (key == "filename" and not re.fullmatch(FILE_NAME, str(value))):
            message = "where to write is not taken from somebody else's run"
            yield ConfigIssue(place, show(value), message)
        elif isinstance(value, str) and not re.fullmatch(PLAIN, value, re.DOTALL):
            message = "of somebody else's run only plain references are resolved"
            yield ConfigIssue(place, value, message)


def named_targets(folders: Iterable[str | Path]) -> set[tuple[str, str]]:
    """(group, `_target_`) of all that the yaml files of these folders name."""
    found = set()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
    for folder in map(Path, folders):
        for file in folder.rglob("*.yaml"):
            text = file.read_text(errors="replace")
            group = ".".join(file.relative_to(folder).parts[:-1])
            top = "" if "@package _global_" in text else group
            with suppress(yaml.YAMLError):  # it is no choice either
                for place, value in walk(yaml.load(text, loader), top):
                    if place.endswith("_target_"):
                        found.add((_group_of(place), str(value)))
    return found


def find_folders() -> list[str | Path]:
    """Those of one's own yaml files: what Hydra composed of, or conf/ and the library's."""
    with suppress(ValueError, AttributeError):  # no command of ours
        sources = HydraConfig.get().runtime.config_sources
        if found := [one.path for one in sources if one.schema == "file"]:
            return [*found, locations.LIBRARY / "conf"]
    return [*filter(None, [locations.find_conf()]), locations.LIBRARY / "conf"]


def _group_of(place: str) -> str:
    return "metrics" if place.startswith("module.metrics.") else place.partition(".")[0]


def _is_taken(place: str, target: Any, allowed: Sequence[str], named: set[tuple[str, str]]) -> bool:
    group = _group_of(place)
    pattern = LIBRARY_CLASSES.get(group)
    return isinstance(target, str) and (
        (group, target) in named
        or bool(pattern and re.fullmatch(pattern, target))
        or any(f"{target}.".startswith(f"{one}.") for one in allowed)
    )


def is_left_out(one: Override) -> bool:
    """Return whether an override says where a run lies, writes or starts from, not what it is."""
    names = (one.key_or_group, one.package or "")
    parts = [name.replace("/", ".").split(".") for name in names]
    return any(part[0] in NOT_TAKEN or part[-1] in WRITTEN for part in parts)


def is_permission(one: Override) -> bool:
    """Return whether an override allows packages, or names where choices are looked up."""
    return one.key_or_group in TYPED


def _find_refused(
    kept: list[Override], now: list[Override], run_dir: str, is_own: bool, reads_data: bool
) -> Iterator[ConfigIssue]:
    """Yield what of an old run's overrides today's schema, or the rule about trust, refuses."""
    # Before anything is composed: then no file but those of conf/ is read.
    found = [] if is_own else list(_find_foreign_choices(kept))
    who = f"{UNTRUSTED}: "
    if not found:
        here = [line_of(one) for one in now if is_permission(one)]
        cfg, refused = compose_and_explain([*here, *map(line_of, kept)])
        if refused or is_own:
            found, who = refused, ""
        else:
            found = list(_find_untrusted(kept, cfg, run_dir, reads_data))
    for one in found:
        message = f"{who}was started with {one.key}={one.value}: {one.message}"
        yield ConfigIssue("from_run", run_dir, message, hint=one.hint or command(f"~{one.key}"))


def _find_foreign_choices(kept: Iterable[Override]) -> Iterator[ConfigIssue]:
    """Yield the choices of an untrusted run that name files outside of conf/."""
    for one in kept:
        value = line_of(one).partition("=")[2]
        if is_choice(one) and re.search(NO_CHOICE, value):
            yield ConfigIssue(one.key_or_group, value, "not a choice of conf/")


def _find_untrusted(
    kept: list[Override], cfg: DictConfig, run_dir: str, reads_data: bool
) -> Iterator[ConfigIssue]:
    """Yield the values of an untrusted run that may not be taken from it."""
    values = {one.key_or_group: one.value() for one in kept if not one.is_delete()}
    places = [path.removeprefix("file://") for path in cfg.hydra.searchpath]
    problems = list(check_values(values, cfg.allowed_targets, places))
    yield from problems
    if not problems:
        for one, message in named_outside(kept, run_dir, cfg):
            key, given = one.key_or_group, line_of(one).partition("=")[2]
            if reads_data or not key.startswith("data."):
                message = f"{message}: type it again to have it read"
                yield ConfigIssue(key, given, message, hint=command(line_of(one)))


def is_choice(one: Override) -> bool:
    """Return whether an override names choices of a group, and no value of a key."""
    return "." not in one.key_or_group and one.key_or_group not in FREE


def named_outside(
    typed: Iterable[Override], run_dir: str | Path, cfg: DictConfig | None = None
) -> Iterator[tuple[Override, str]]:
    """Yield overrides that read files neither in this project nor beside the run, and the reason.

    Args:
        cfg: Composed config, in which references of the values are resolved.
    """
    roots = allowed_roots(run_dir)
    for one in typed:
        reasons = (find_outside(text, roots) for text in _texts_of(one, cfg))
        if message := next(filter(None, reasons), None):
            yield one, message


def _texts_of(one: Override, cfg: DictConfig | None) -> Iterator[str]:
    """Yield the strings of an override's value that may name files, as typed and as resolved."""
    if one.is_delete() or (is_choice(one) and not isinstance(one.value(), dict)):
        return
    values = [one.value()]
    if cfg is not None:
        with suppress(OmegaConfBaseException):
            node = OmegaConf.select(cfg, one.key_or_group)
            is_node = OmegaConf.is_config(node)
            values.append(OmegaConf.to_container(node, resolve=True) if is_node else node)
    for place, text in (pair for value in values for pair in walk(value, one.key_or_group)):
        if isinstance(text, str) and place.rpartition(".")[2] not in NO_PATHS:
            yield text
