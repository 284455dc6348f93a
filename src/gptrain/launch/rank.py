"""What surrounds the training function in every rank: logging, and an exit code for each end."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from gptrain.config import ConfigError, problems, this_process
from gptrain.launch.outcome import JobFailed


def run_rank(train: Callable[[DictConfig], dict], cfg: DictConfig) -> dict[str, float]:
    """Runs `train` in this process."""
    quiet_lightning()
    return train(cfg)


def rank_process(
    train: Callable, cfg: DictConfig, hydra_cfg: DictConfig, environment: dict[str, str]
) -> None:
    """Entry of a spawned rank: its environment, its log, then the run; never returns."""
    os.environ.update(environment)
    HydraConfig.instance().cfg = hydra_cfg
    if this_process().rank == 0:
        configure_log(hydra_cfg.hydra.job_logging, hydra_cfg.hydra.verbose)
    else:
        logging.getLogger().setLevel(logging.ERROR)
    code = problems.DONE
    try:
        run_rank(train, cfg)
    except JobFailed as failure:
        code = failure.code
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = problems.FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: other ranks may be gone, and destructors of a process group wait for them.
    os._exit(code)


def quiet_lightning() -> None:
    """Lightning's own handler would print each line a second time beside Hydra's."""
    logging.getLogger("lightning").handlers.clear()
    logging.getLogger("lightning.pytorch").handlers.clear()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
