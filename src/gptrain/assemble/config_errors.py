"""Turns errors of parts that do not fit into errors that name an option of the config."""

from collections.abc import Generator
from contextlib import contextmanager

from gptrain.core.errors import BAD_CONFIG, INPUT_NOT_FOUND, ConfigError, DataError
from gptrain.core.locations import expand_home
from gptrain.core.schema import RunConfig
from gptrain.parallel.requirements import IncompatibleModelError


@contextmanager
def as_config_errors(
    cfg: RunConfig, key: str = "", code: int = BAD_CONFIG, misfit: str = ""
) -> Generator[None, None, None]:
    """Turn errors inside the block into a ConfigError, one line that names the option.

    An IncompatibleModelError names the option itself. Any other ValueError, a TypeError about a
    keyword argument that a class does not take, and a FileNotFoundError (exit code 66) are reported
    for `key`; if `key` is empty, they are raised as they are. Errors of all other types pass
    unchanged.

    Args:
        cfg: Configuration of the run.
        key: Key of the option.
        code: Exit code, except for a FileNotFoundError.
        misfit: Hint, except for a FileNotFoundError and a DataError.

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
        value = cfg.value_of(key)
        message = str(error).removeprefix(f"{expand_home(str(value))}: ")
        code = INPUT_NOT_FOUND if isinstance(error, FileNotFoundError) else code
        hint = "" if isinstance(error, FileNotFoundError | DataError) else misfit
        raise ConfigError.of(key, value, message, hint=hint, code=code) from error
