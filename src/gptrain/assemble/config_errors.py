"""Errors of a part that does not fit, turned into errors about the option that asked for it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from gptrain.core.errors import ConfigError
from gptrain.core.schema import RunConfig
from gptrain.parallel.requirements import IncompatibleModelError


@contextmanager
def as_config_errors(cfg: RunConfig, key: str = "") -> Generator[None, None, None]:
    """Turn errors inside the block into a ConfigError that names the option.

    An IncompatibleModelError names the option itself. Any other ValueError, and a TypeError about a
    keyword argument that a class does not take, is reported for `key`. All other errors, and all of
    these if `key` is empty, are raised as they are.

    Args:
        cfg: Config from which the value of the option is shown.
        key: Dotted key of the option that the block is about.

    Raises:
        ConfigError: If the block raises one of the errors above.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        key = error.key if isinstance(error, IncompatibleModelError) else key
        is_other_type_error = isinstance(error, TypeError) and "keyword argument" not in str(error)
        if not key or is_other_type_error:
            raise
        raise ConfigError.of(key, cfg.value_of(key), str(error)) from error
