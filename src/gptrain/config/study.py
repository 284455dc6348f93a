"""An Optuna study that is kept in a database, so that a search can be interrupted and continued."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from gptrain.core import labels
from gptrain.core.errors import INPUT_NOT_FOUND, ConfigError, first_line

STORAGE = "hydra.sweeper.storage"


def continue_study(cfg: DictConfig) -> list[str]:
    """Return the overrides by which a search continues the study of `hydra.sweeper.storage`.

    A sampler with a fixed seed would draw the points of the first start again. The number of trials
    that the study already has is therefore added to the seed.

    Args:
        cfg: Config of the first job, with Hydra's node.

    Raises:
        ConfigError: If the installed packages cannot keep a study, or the storage cannot be opened.
    """
    storage, name, seed = (
        OmegaConf.select(cfg, key, throw_on_missing=False)
        for key in (STORAGE, "hydra.sweeper.study_name", "hydra.sweeper.sampler.seed")
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
    n_trials = sum(study.n_trials for study in studies if study.study_name == name)
    if not n_trials or not isinstance(seed, int):
        return []
    print(labels.line("study", f"{name}: continues after {n_trials} trials"))
    return [f"hydra.sweeper.sampler.seed={seed + n_trials}"]


def check_versions(storage: str) -> None:
    """Check that the installed SQLAlchemy can keep a study of the installed optuna.

    optuna 2, which Hydra's sweeper needs, relies on the automatic commit of SQLAlchemy 1. With
    SQLAlchemy 2 the study is lost before its first trial, and optuna raises a bare AssertionError.

    Raises:
        ConfigError: If optuna 2 and SQLAlchemy 2 or newer are installed.
    """
    numbers = {name: version(name) for name in ("optuna", "sqlalchemy")}
    majors = [int(number.partition(".")[0]) for number in numbers.values()]
    if majors[0] < 3 and majors[1] > 1:
        pair = " with ".join(f"{name} {number}" for name, number in numbers.items())
        message, hint = f"{pair} cannot keep a study", 'pip install "sqlalchemy<2" "alembic<1.20"'
        raise ConfigError.of(STORAGE, storage, message, hint=hint)
