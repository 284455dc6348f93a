"""Implements `from_run=<folder>`: the overrides of an earlier run, followed by those typed now.

They may name any class that is installed here. So a run that this user did not start is refused,
unless `trust=true` is typed.
"""

from hydra.core.override_parser.overrides_parser import OverridesParser

from gptrain.checkpoints.signature import read_record
from gptrain.config.compose import key_of, open_hydra
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError
from gptrain.core.locations import expand_home

# Groups and keys that are never taken from an earlier run: where it wrote, where it resumed from,
# and what its user trusted.
NOT_TAKEN = {
    "run_dir", "output_dir", "logger", "profiler", "hydra", "ckpt_path", "allow_changes",
    "from_run", "trust",
}  # fmt: skip


def expand(typed: list[str]) -> list[str]:
    """Return the overrides of the run in `from_run`, if it is typed, and the typed overrides.

    A typed key replaces the run's override of the same key, and a typed `~key` removes it. Keys in
    NOT_TAKEN are not taken. Raises a ConfigError if the run is missing, or neither signed nor
    trusted, and an UnreadableFileError if its overrides are no YAML.
    """
    values = {key_of(word): word.partition("=")[2] for word in typed}
    if values.get("from_run", "") in ("", "null"):
        return typed
    with open_hydra(typed):  # a value that Hydra cannot read is an error of the key
        (run,) = OverridesParser.create().parse_overrides([f"from_run={values['from_run']}"])
    folder = str(run.value())
    file = expand_home(folder) / ".hydra" / "overrides.yaml"
    if not file.is_file():
        raise ConfigError.of("from_run", folder, "no run in this folder", code=INPUT_NOT_FOUND)
    words, is_signed = read_record(file)
    if not is_signed and values.get("trust", "").lower() != "true":
        message = "not signed by you on this machine; its config can run any code"
        raise ConfigError.of("from_run", folder, message, hint="trust=true")
    saved = [word for word in map(str, words) if not is_left_out(word)]
    kept = [word for word in saved if key_of(word) not in values]
    done = {f"~{key_of(word)}" for word in saved}  # removed an override of the run
    return [*kept, *(word for word in typed if word not in done)]


def is_left_out(word: str) -> bool:
    """Return whether `from_run` never takes over an override, because its key is in NOT_TAKEN."""
    return key_of(word).replace("/", ".").split(".")[0].partition("@")[0] in NOT_TAKEN
