"""Which rank this is, told to Lightning."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment


class Ranks(ClusterEnvironment):
    """This process's place in the job, as gptrain.launch.process reads it of any launcher.

    Lightning's guess takes a run that is started by hand in a SLURM allocation for a task of srun
    (pytorch-lightning#20391), and refuses `srun --ntasks`. The process group exists already, so
    the address is not asked for.
    """

    creates_processes_externally = True

    def __init__(self, rank: int, local_rank: int, world_size: int, n_local: int):
        self._rank, self._local_rank = rank, local_rank
        self._world_size, self._n_local = world_size, n_local

    @staticmethod
    def detect() -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", 0))

    def world_size(self) -> int:
        return self._world_size

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._rank // self._n_local

    def set_world_size(self, size: int) -> None:
        """Nothing: the launcher has said it."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the launcher has said it."""
