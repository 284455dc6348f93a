"""Check that the config and the launcher that started this process agree."""

from collections.abc import Iterator

from gptrain.config.check import CheckedConfig
from gptrain.core.errors import ConfigIssue
from gptrain.runtime.process import count_devices, count_nodes, this_process


def check_launcher(checked: CheckedConfig) -> Iterator[ConfigIssue]:
    """Yield a problem if the config does not match the launcher that started this process.

    `trainer.devices` and `trainer.num_nodes` must match the number of ranks. Without a launcher,
    only a run on several nodes is a problem.

    Raises:
        ConfigError: If the environment variables of the launcher are no numbers.
    """
    process = this_process()
    n_nodes = count_nodes(checked.run.trainer.num_nodes or 1)
    if not process.is_rank:
        if n_nodes > 1:
            message = "without a launcher, ranks start on this machine only"
            hint = f"torchrun --nnodes={n_nodes} ... train.py on each node, or srun, or mpirun"
            yield checked.error("trainer.num_nodes", message, hint)
        return
    n_per_node = process.world_size // process.n_nodes
    n_local = count_devices(checked.run.trainer.devices) or n_per_node
    hint = f"trainer.devices={n_per_node} trainer.num_nodes={process.n_nodes}"
    if n_local * n_nodes != process.world_size:
        product = f"{n_local} x trainer.num_nodes={n_nodes} = {n_local * n_nodes}"
        message = f"{product}, but the launcher has started {process.world_size} ranks"
        yield checked.error("trainer.devices", message, hint)
    elif process.n_nodes != n_nodes:
        message = f"the launcher has started ranks on {process.n_nodes} nodes"
        yield checked.error("trainer.num_nodes", message, hint)
