"""The rank of this process and the number of ranks, in the form that Lightning reads."""

from lightning.fabric.plugins.environments import TorchElasticEnvironment

from gptrain.runtime.process import Process


class RankEnvironment(TorchElasticEnvironment):
    """Gives Lightning the rank and the world size that `gptrain.runtime.process` has detected.

    Lightning's own detection would take a run that a person starts in a SLURM allocation for a rank
    of srun (pytorch-lightning#20391), and it refuses `srun --ntasks`.

    Args:
        process: Rank of this process, and numbers of ranks and nodes.
    """

    def __init__(self, process: Process):
        self._process = process

    def world_size(self) -> int:
        """Return the number of ranks of the job."""
        return self._process.world_size

    def global_rank(self) -> int:
        """Return the rank of this process in the job."""
        return self._process.rank

    def local_rank(self) -> int:
        """Return the rank of this process on its node."""
        return self._process.local_rank

    def node_rank(self) -> int:
        """Return the number of this process's node, from 0."""
        return self._process.rank // (self._process.world_size // self._process.n_nodes)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Do nothing: accept any number of devices."""
