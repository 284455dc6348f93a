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
    """Turn errors inside a `with` block into a ConfigError, one line that names a config key.

    An IncompatibleModelError names the key itself. Any other ValueError (also a DataError), a
    TypeError about a keyword argument that a function does not take, and a FileNotFoundError are
    reported for `key`. All other errors pass unchanged, and with an empty `key` also these.

    Args:
        cfg: Configuration of the run, which has the value of the key.
        key: Dotted key of the option.
        code: Exit code. A FileNotFoundError always has 66.
        misfit: Hint of the error. A FileNotFoundError and a DataError have none.

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
