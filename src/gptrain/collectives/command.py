"""Run the eight collectives between processes and print what each rank passes and gets.

    python -m gptrain.collectives trainer.devices=4
    torchrun --nproc_per_node=4 -m gptrain.collectives

    trainer.devices  number of ranks (2)
    max_bytes        size of the buffer of the last comparison (16 MiB)

At the end, the command compares three all-reduces: one through rank 0, one around a ring, and that
of the backend. `python -m gptrain.plan --measure` measures the speed of all collectives.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

from gptrain import config
from gptrain.core.schema import RunConfig
from gptrain.core.value_types import between

if TYPE_CHECKING:
    from gptrain.runtime.watchdog import Guard

DEFAULTS = {"max_bytes": 2**24}


class CollectivesRun(RunConfig):
    """Configuration of the command: the keys of a run and `max_bytes`.

    The class must not be in `__main__.py`: its instances are pickled for the ranks, whose
    `__main__` is another module.
    """

    max_bytes: Annotated[int, between(2**16)]


def main() -> None:
    """Run `python -m gptrain.collectives` with the words of `sys.argv`, and exit with its code.

    The word `--explain` is accepted and has no effect, because explaining is the only mode.
    `sys.argv` is changed: the defaults of the command are put in front of the words.
    """
    words = [word for word in sys.argv[1:] if word != "--explain"]
    sys.argv[1:] = ["name=collectives", default_devices(), *words]
    config.main(start, CollectivesRun, DEFAULTS, usage=__doc__)


def default_devices() -> str:
    """Return the default override of trainer.devices: as many ranks as torchrun started, or 2."""
    return f"trainer.devices={'auto' if 'RANK' in os.environ else 2}"


def start(cfg: CollectivesRun) -> None:
    """Start the ranks and wait for them, or run this process as a rank that torchrun started.

    Args:
        cfg: Options of the command.

    Raises:
        JobFailedError: If a rank fails, after its error has been printed.
        ConfigError: If another run holds the run folder of the command.
    """
    # Import torch only now, so that an invalid option is reported without waiting for the import.
    from gptrain import runtime

    runtime.run(run_rank, cfg, lambda *_: None)


def run_rank(cfg: CollectivesRun, guard: Guard) -> dict[str, float]:
    """Run and explain all collectives on this rank, and compare three all-reduces.

    All ranks must call this function; rank 0 prints.

    Args:
        cfg: Options of the command.
        guard: Watchdog of this rank, which ends the command if a collective hangs.

    Returns:
        An empty dict, in place of the metrics that a training returns.

    Raises:
        RuntimeError: If an all-reduce has a wrong result on this rank.
        MissingRanksError: If not all ranks start in time.
    """
    from gptrain.collectives import operations

    with operations.process_group(cfg) as device:
        for name in operations.COLLECTIVES:
            guard.heartbeat.beat(phase=name)
            operations.explain(name, device)
        operations.compare_all_reduces(device, cfg.max_bytes)
    return {}
