"""The command: what each rank does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from gptrain import collectives as package
from gptrain import config
from gptrain.config.kinds import integer
from gptrain.config.schema import Run

if TYPE_CHECKING:
    from gptrain.resilience.watchdog import Guard


class CollectivesRun(Run):
    """A run's keys and the command's own."""

    bench: bool
    max_bytes: integer(2**16)


def main() -> None:
    """The command line; --explain is what it does without --bench."""
    words = [word for word in sys.argv[1:] if word not in ("--bench", "--explain")]
    defaults = {"bench": "--bench" in sys.argv, "max_bytes": 2**24}
    n_ranks = "auto" if "RANK" in os.environ else 2  # torchrun's, or what shows something anywhere
    sys.argv[1:] = ["name=collectives", f"trainer.devices={n_ranks}", *words]
    config.main(start, CollectivesRun, defaults, usage=package.__doc__)


def start(cfg: DictConfig) -> None:
    """Starts the ranks, or is one of those that torchrun started."""
    from gptrain import ranks  # here, so that a wrong option is answered without torch

    ranks.run(work, cfg, lambda *_: None)


def work(cfg: DictConfig, guard: Guard) -> dict[str, float]:
    """What each rank does; rank 0 prints."""
    import torch.distributed as dist

    from gptrain.collectives import measure, operations
    from gptrain.parallel.mesh import start_group
    from gptrain.ranks.devices import find_machine, set_threads
    from gptrain.ranks.process import this_process

    machine, rank = find_machine(cfg), this_process().rank
    backend, n_ranks = cfg.strategy.backend or machine.backend, machine.world_size
    device = machine.device(this_process().local_rank)
    set_threads(machine.n_local)
    start_group(backend, device, rank, n_ranks, cfg.strategy.timeout_s)
    operations.say(f"{backend}, {n_ranks} ranks; the root is rank 0")
    times = {}
    for name in operations.COLLECTIVES:
        guard.heartbeat.beat(phase=name)
        if cfg.bench:
            times[name] = measure.sweep(name, device, cfg.max_bytes)
        else:
            operations.explain(name, device)
    measure.compare_all_reduces(device, cfg.max_bytes)
    if cfg.bench:
        measure.keep(times["all_reduce"], device, Path(cfg.output_dir) / "machine.json")
    dist.destroy_process_group()
    return {}
