"""What ranks say to each other: the eight collectives, seen on the real backend.

    python -m gptrain.collectives --explain trainer.devices=4      each rank's numbers before, after
    torchrun --nproc_per_node=4 -m gptrain.collectives --explain   under torchrun

    max_bytes  of the all-reduce (16 MiB)           trainer.devices  2 if not given

It ends with an all-reduce made of sends and receives, through rank 0 and around a ring, beside the
library's. How fast they are here: `python -m gptrain.plan --measure`.
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
    """A run's keys and the command's own."""

    max_bytes: Annotated[int, between(2**16)]


def main() -> None:
    """The command line; --explain is all that it does."""
    words = [word for word in sys.argv[1:] if word != "--explain"]
    sys.argv[1:] = ["name=collectives", default_devices(), *words]
    config.main(start, CollectivesRun, DEFAULTS, usage=__doc__)


def default_devices() -> str:
    """An override: the ranks of torchrun, else two, which show something on any machine."""
    return f"trainer.devices={'auto' if 'RANK' in os.environ else 2}"


def start(cfg: CollectivesRun) -> None:
    """Starts the ranks, or is one of those that torchrun started."""
    from gptrain import runtime  # here, so that a wrong option is answered without torch

    runtime.run(work, cfg, lambda *_: None)


def work(cfg: CollectivesRun, guard: Guard) -> dict[str, float]:
    """What each rank does; rank 0 prints."""
    from gptrain.collectives import operations

    with operations.group_of(cfg) as device:
        for name in operations.COLLECTIVES:
            guard.heartbeat.beat(phase=name)
            operations.explain(name, device)
        operations.compare_all_reduces(device, cfg.max_bytes)
    return {}


if __name__ == "__main__":
    main()
