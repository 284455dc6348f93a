"""What Lightning says that is not worth reading."""

from __future__ import annotations

import logging
import re
import warnings

NOISE = (
    "isinstance(treespec, LeafSpec)",  # Lightning 2.6 on torch 2.13
    "The number of training batches",  # the last step is logged whatever the interval
    "It is recommended to use `self.log",  # torchmetrics has reduced over ranks already
    "You're resuming from a checkpoint that ended before the epoch ended",  # our order resumes
    "does not have many workers",  # batches are one gather from a memory map
    "GPU available but not used",
    "`srun` command is available on your system but is not used",  # our supervisor starts ranks
)


def quiet() -> None:
    """Leaves of Lightning's lines the warnings that a person can act on, each printed once.

    Its loggers have a handler of their own, beside the one that Hydra gives the root logger.
    """
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.WARNING)
    for words in NOISE:
        warnings.filterwarnings("ignore", message=f".*{re.escape(words)}")
