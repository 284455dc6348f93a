"""Lightning's messages: which of them are shown, and which become errors of the config."""

import logging
import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from gptrain.core.errors import ConfigError

# Warnings of Lightning that a user of gptrain cannot act on, each by a part of its message.
_HIDDEN_WARNINGS = (
    "isinstance(treespec, LeafSpec)",  # Lightning 2.6 calls a function that torch 2.13 deprecates
    "The number of training batches",  # gptrain logs the last step whatever the interval
    "It is recommended to use `self.log",  # evaluation metrics are reduced over ranks already
    "You're resuming from a checkpoint that ended before the epoch ended",  # the resume is exact
    "does not have many workers",  # gptrain's text data needs one read of a memory map per batch
    "You called `self.log('step'",  # gptrain logs `step` as the x axis of all loggers
    "but loading a checkpoint outside the 'fit' stage",  # a checkpoint's weights are the averages
    "GPU available but not used",  # trainer.accelerator=cpu was typed
    "Checkpoint directory",  # a resumed run continues to write to ModelCheckpoint's folder
)
_LIGHTNING_FOLDER = str(Path(pl.__file__).parent.parent)
# Beginnings of the RuntimeErrors of Lightning that are about the configuration.
_ABOUT_CONFIG = (
    "Found more than one stateful callback",
    "Early stopping conditioned on metric",
    "Training with multiple optimizers",
)


@contextmanager
def misconfiguration_as_config_error(key: str = "trainer") -> Generator[None, None, None]:
    """Turn Lightning's errors about a wrong configuration, in a with block, into a ConfigError.

    Args:
        key: Config key that the error names.

    Raises:
        ConfigError: If the block raises a MisconfigurationException, or one of three RuntimeErrors
            that Lightning raises for a wrong configuration. Other errors pass unchanged.
    """
    try:
        yield
    except (MisconfigurationException, RuntimeError) as error:
        message = " ".join(str(error).split())
        if not (isinstance(error, MisconfigurationException) or message.startswith(_ABOUT_CONFIG)):
            raise
        raise ConfigError.of(key, None, message) from error


def quiet_lightning() -> None:
    """Hide Lightning's messages below a warning, and warnings that a user cannot act on.

    Messages of callbacks stay, and those that a user's code logs by `rank_zero_info`. The handler
    of the root logger gets them. A second call changes nothing.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.callbacks").setLevel(logging.INFO)
    rank_zero_log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    rank_zero_log.setLevel(logging.INFO)
    rank_zero_log.addFilter(_is_for_users)  # has no effect if it was added before
    for message in _HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{re.escape(message)}")


def _is_for_users(record: logging.LogRecord) -> bool:
    """Return whether a record comes from a file outside of Lightning, or is at least a warning."""
    return record.levelno >= logging.WARNING or not record.pathname.startswith(_LIGHTNING_FOLDER)
