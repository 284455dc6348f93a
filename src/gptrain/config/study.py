"""Continues an interrupted hyper-parameter search, whose Optuna study is in a database."""

from importlib.metadata import version
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from gptrain.core import labels
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError, first_line

STORAGE = "hydra.sweeper.storage"


def continue_study(cfg: DictConfig) -> list[str]:
    """Return the overrides by which a search continues an Optuna study that has trials already.

    A sampler with a fixed seed would draw the points of the first start again. The number of trials
    in the study is therefore added to the seed. Returns no override if the sweeper has no storage
    (the URL of a database), the sampler has no integer seed, the study has no trials, or optuna is
    not installed. Prints a line if the study continues. From here on Optuna logs only warnings and
    errors.

    Args:
        cfg: Composed config of the sweep, with Hydra's own node.

    Raises:
        ConfigError: If the installed packages cannot store a study, or the storage cannot be
            opened.
    """
    storage, study_name, seed = (
        OmegaConf.select(cfg, f"hydra.sweeper.{key}", throw_on_missing=False)
        for key in ("storage", "study_name", "sampler.seed")
    )
    if not isinstance(storage, str) or not find_spec("optuna"):
        return []
    check_versions(storage)
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        studies = optuna.get_all_study_summaries(storage)
    except SQLAlchemyError as error:
        message = f"cannot be opened: {first_line(error)}"
        raise ConfigError.of(STORAGE, storage, message, code=INPUT_NOT_FOUND) from error
    n_trials = sum(study.n_trials for study in studies if study.study_name == study_name)
    if not n_trials or not isinstance(seed, int):
        return []
    done = labels.count_text(n_trials, "trial")
    print(labels.line("study", f"{study_name}: continues after {done}"))
    return [f"hydra.sweeper.sampler.seed={seed + n_trials}"]


def check_versions(storage: str) -> None:
    """Check that the installed SQLAlchemy can store a study of the installed optuna.

    optuna 2, which Hydra's sweeper needs, relies on the automatic commit of SQLAlchemy 1. With
    SQLAlchemy 2 the study is not saved before its first trial, and optuna raises an AssertionError
    without a message. Call this function only if optuna, which requires SQLAlchemy, is installed.

    Args:
        storage: URL of the database, for the error message.

    Raises:
        ConfigError: If optuna 2 and SQLAlchemy 2 or newer are installed.
        PackageNotFoundError: If optuna or SQLAlchemy is not installed.
    """
    numbers = {name: version(name) for name in ("optuna", "sqlalchemy")}
    majors = [int(number.partition(".")[0]) for number in numbers.values()]
    if majors[0] < 3 and majors[1] > 1:
        pair = " with ".join(f"{name} {number}" for name, number in numbers.items())
        message = f"{pair} cannot store a study"
        hint = 'pip install "sqlalchemy<2" "alembic<1.20"'
        raise ConfigError.of(STORAGE, storage, message, hint=hint)
