"""Turns errors of parts that do not fit into errors that name an option of the config."""

import re
from collections.abc import Generator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from gptrain.core.errors import BAD_CONFIG, INPUT_NOT_FOUND, ConfigError
from gptrain.core.schema import RunConfig
from gptrain.parallel.requirements import IncompatibleModelError

# Lightning's errors about a value that is monitored and was never logged: the name of the value.
MISSING_MONITOR = re.compile(
    r"conditioned on metric `?(.+?)`? which is not available|ModelCheckpoint\(monitor='(.+?)'\)"
)


@contextmanager
def as_config_errors(cfg: RunConfig, key: str = "") -> Generator[None, None, None]:
    """Turn errors inside the block into a ConfigError, one line that names the option.

    An IncompatibleModelError names the option itself. Any other ValueError, a TypeError about a
    keyword argument that a class does not take, and a FileNotFoundError (exit code 66) are reported
    for `key`; if `key` is empty, they are raised as they are. Errors of all other types pass
    unchanged.

    Args:
        cfg: Config from which the value of the option is shown.
        key: Dotted key of the option that the block is about.

    Raises:
        ConfigError: If the block raises one of the errors above.
    """
    try:
        yield
    except (TypeError, ValueError, FileNotFoundError) as error:
        key = error.key if isinstance(error, IncompatibleModelError) else key
        is_other_type_error = isinstance(error, TypeError) and "keyword argument" not in str(error)
        if not key or is_other_type_error:
            raise
        code = INPUT_NOT_FOUND if isinstance(error, FileNotFoundError) else BAD_CONFIG
        raise ConfigError.of(key, cfg.value_of(key), str(error), code=code) from error


@contextmanager
def missing_monitor_as_config_error(cfg: RunConfig, trainer: pl.Trainer) -> Generator[None]:
    """Turn an error about a monitored value that is not logged into one line.

    Args:
        cfg: Config with the callbacks. ReduceLROnPlateau watches its `checkpoint.monitor`.
        trainer: Trainer that has the names of the logged values.

    Raises:
        ConfigError: If the block raises Lightning's error at the first use of the value. The
            message has the option and the names that are logged. Other errors pass unchanged.
    """
    try:
        yield
    except (MisconfigurationException, RuntimeError) as error:
        match = MISSING_MONITOR.search(str(error))
        if match is None:
            raise
        logged = sorted(trainer.callback_metrics)
        raise _missing_monitor(cfg, error, match[1] or match[2], logged) from error


def _missing_monitor(cfg: RunConfig, error: Exception, name: str, logged: list[str]) -> ConfigError:
    """Return the ConfigError for a monitored value that is not logged.

    Args:
        cfg: Config with the callbacks.
        error: Error, whose message begins with the class of a schedule that has failed.
        name: Monitored name.
        logged: Names that are logged.
    """
    allowed = ", ".join(logged)
    monitors = {**monitors_of(cfg), "checkpoint.monitor": cfg.checkpoint.monitor}
    for key, monitor in monitors.items():
        if monitor == name:
            message = "no value of this name is logged"
            return ConfigError.of(key, name, message, allowed=allowed)
    # The callback or the schedule was made by code of the user.
    message = f"no value is logged with the name {name}, which {{}} monitors"
    if "ReduceLROnPlateau" in str(error):
        key, value = "module._target_", cfg.module.target
        return ConfigError.of(key, value, message.format("its schedule"), allowed=allowed)
    return ConfigError.of("callbacks", None, message.format("a callback"), allowed=allowed)


def monitors_of(cfg: RunConfig) -> dict[str, str]:
    """Return which logged value each callback of the config monitors, as EarlyStopping does.

    The dict maps a config key, such as `callbacks.early_stopping.monitor`, to the name of the
    value. Callbacks without an argument `monitor` are left out.

    Args:
        cfg: Configuration of the run.
    """
    nodes = {key: node.arguments for key, node in cfg.callbacks.items() if node}
    return {
        f"callbacks.{key}.monitor": arguments["monitor"]
        for key, arguments in nodes.items()
        if isinstance(arguments.get("monitor"), str)
    }
